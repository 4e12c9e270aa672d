/* Interface of a codec in a shared library, for what a format file cannot describe: the library
   exports one function, const ReplayevalCodec* replayeval_codec(void); which returns a table that
   stays valid for the life of the process. C only; this header is all a library needs. The
   functions are called from several threads at once, for different heads. Host only. */
#ifndef REPLAYEVAL_CODEC_PLUGIN_H
#define REPLAYEVAL_CODEC_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define REPLAYEVAL_CODEC_VERSION 1
#define REPLAYEVAL_CODEC_SYMBOL "replayeval_codec"

/* One head's state, [head_dim, state_dim] FP32, state_dim contiguous. */
typedef struct ReplayevalCodecShape {
  int32_t head_dim;
  int32_t state_dim;
} ReplayevalCodecShape;

/* What is encoded: indices in the whole model, position of the last token folded; role 0 recurrence
   or shared, 1 read (2 more for a residual). random: null for round to nearest, otherwise head_dim
   * state_dim words of 32 random bits, one an element. */
typedef struct ReplayevalCodecCall {
  ReplayevalCodecShape shape;
  uint32_t layer;
  uint32_t head;
  uint32_t position;
  uint32_t role;
  const uint32_t* random;
} ReplayevalCodecCall;

/* Counts of one encoding, zero when encode is entered. */
typedef struct ReplayevalCodecCounts {
  uint64_t saturated;
  uint64_t clipped;
  uint64_t vanished;
} ReplayevalCodecCounts;

typedef struct ReplayevalCodec {
  uint32_t version; /* REPLAYEVAL_CODEC_VERSION */
  const char* name;
  /* Null, or a message why the shape cannot be stored. */
  const char* (*check_shape)(ReplayevalCodecShape shape);
  /* Bits of information an element, scales included. */
  double (*bits_per_element)(ReplayevalCodecShape shape);
  size_t (*packed_bytes)(ReplayevalCodecShape shape);
  /* Memory that a head keeps between encodings; zeros at the start. May be 0. */
  size_t (*memory_bytes)(ReplayevalCodecShape shape);
  /* 0 on success. state is not to be changed; `packed` and `memory` may have any alignment. */
  int (*encode)(const ReplayevalCodecCall* call, const float* state, unsigned char* packed,
                unsigned char* memory, ReplayevalCodecCounts* counts);
  int (*decode)(ReplayevalCodecShape shape, const unsigned char* packed, float* state);
} ReplayevalCodec;

typedef const ReplayevalCodec* (*ReplayevalCodecFunction)(void);

#ifdef __cplusplus
}
#endif

#endif
