/* A codec library for the tests: one byte an element, one scale a head, and a memory that counts the encodings; the count is stored with the
   state. CODEC_VERSION and CODEC_BREAK make libraries that must be refused or that fail. */
#include <math.h>
#include <string.h>

#include "quant/codec_plugin.h"

#ifndef CODEC_VERSION
#define CODEC_VERSION REPLAYEVAL_CODEC_VERSION
#endif

static size_t elements(ReplayevalCodecShape shape) { return (size_t)shape.head_dim * (size_t)shape.state_dim; }

static const char* check_shape(ReplayevalCodecShape shape) {
  return shape.state_dim % 2 == 0 ? 0 : "state_dim must be even";
}

static double bits_per_element(ReplayevalCodecShape shape) { return 8.0 + 96.0 / (double)elements(shape); }

static size_t packed_bytes(ReplayevalCodecShape shape) { return 12 + elements(shape); }

static size_t memory_bytes(ReplayevalCodecShape shape) {
  (void)shape;
  return 8;
}

static int encode(const ReplayevalCodecCall* call, const float* state, unsigned char* packed, unsigned char* memory,
                  ReplayevalCodecCounts* counts) {
  size_t n = elements(call->shape);
  float amax = 0;
  uint64_t seen;
  for (size_t i = 0; i < n; ++i) {
    float a = fabsf(state[i]);
    if (a > amax) amax = a;
  }
  if (!(amax <= 1e30f)) return 7;
  float scale = amax > 0 ? amax / 127.0f : 1.0f;
  memcpy(&seen, memory, 8);
  ++seen;
  memcpy(memory, &seen, 8);
  memcpy(packed, &seen, 8);
  memcpy(packed + 8, &scale, 4);
  for (size_t i = 0; i < n; ++i) {
    float y = state[i] / scale + 128.0f;
    float offset = call->random ? (float)(call->random[i] >> 8) / 16777216.0f : 0.5f;
    packed[12 + i] = (unsigned char)floorf(y + offset);
  }
  counts->vanished = 0;
  return 0;
}

static int decode(ReplayevalCodecShape shape, const unsigned char* packed, float* state) {
  float scale;
  memcpy(&scale, packed + 8, 4);
  for (size_t i = 0; i < elements(shape); ++i) state[i] = ((float)packed[12 + i] - 128.0f) * scale;
  return 0;
}

static const ReplayevalCodec kCodec = {CODEC_VERSION, "scaled_byte", check_shape, bits_per_element, packed_bytes, memory_bytes, encode,
#ifdef CODEC_BREAK
                                       0
#else
                                       decode
#endif
};

const ReplayevalCodec* replayeval_codec(void) { return &kCodec; }
