// Sums of Mamba-2 over a head's matrix in the order of kernels/mamba2.h, by all threads of a block.
#pragma once

#include "kernels/replay_cuda.cuh"

namespace replayeval {

/// out[q * out_row + r] = rows_r . queries_q for r < row_count, q < query_count over n16 groups of
/// 16 lanes, in the order of the host's dot product; 2 rows by 4 queries a group of four threads.
inline __device__ void dot_rows(const float* rows, int row_stride, int row_count,
                                const float* queries, int query_stride, int query_count, int n16,
                                float* out, int out_row) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = lane & 3, group = lane >> 2;
  // Groups that are served together read rows 4 apart, which lie in different banks.
  const int own_row = (group >> 1) + (group & 1) * 4;
  const int row_tiles = (row_count + 15) / 16, query_tiles = (query_count + 3) / 4;
  for (int tile = warp; tile < row_tiles * query_tiles; tile += static_cast<int>(blockDim.x >> 5)) {
    const int r0 = tile % row_tiles * 16 + own_row, q0 = tile / row_tiles * 4;
    const float* row[2];
    const float* query[4];
    for (int i = 0; i < 2; ++i)
      row[i] = rows + min(r0 + 8 * i, row_count - 1) * row_stride + 4 * part;
    for (int i = 0; i < 4; ++i)
      query[i] = queries + min(q0 + i, query_count - 1) * query_stride + 4 * part;
    float4 sum[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = make_float4(0, 0, 0, 0);
    for (int m = 0; m < n16; ++m) {
      const float4 a = load4(row[0] + 16 * m), b = load4(row[1] + 16 * m);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float4 c = load4(query[q] + 16 * m);
        sum[0][q] = fma4(a, c, sum[0][q]);
        sum[1][q] = fma4(b, c, sum[1][q]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float total = sum_of_lanes(sum[i][q]);
        if (part == 0 && r0 + 8 * i < row_count && q0 + q < query_count)
          out[(q0 + q) * out_row + r0 + 8 * i] = total;
      }
    }
  }
}

/// state[p][n] = carry state[p][n] + sum_j u[j][p] v[j][n], j in order; 4 rows by 4 columns a
/// thread.
inline __device__ void fold_state(float* state, int row_stride, int head_dim, int state_dim,
                                  float carry, const float* u, int u_row, const float* v, int v_row,
                                  int records) {
  const int quads = (state_dim + 3) / 4, tiles = (head_dim + 3) / 4 * quads;
  for (int tile = threadIdx.x; tile < tiles; tile += static_cast<int>(blockDim.x)) {
    const int n = tile % quads * 4, p = tile / quads * 4;
    float4 sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 s = load4(state + min(p + i, head_dim - 1) * row_stride + n);
      sum[i] = make_float4(carry * s.x, carry * s.y, carry * s.z, carry * s.w);
    }
    for (int j = 0; j < records; ++j) {
      const float4 w = load4(u + j * u_row + p), b = load4(v + j * v_row + n);
      sum[0] = fma1(w.x, b, sum[0]);
      sum[1] = fma1(w.y, b, sum[1]);
      sum[2] = fma1(w.z, b, sum[2]);
      sum[3] = fma1(w.w, b, sum[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p + i >= head_dim) continue;
      float* to = state + (p + i) * row_stride + n;
      if (n + 4 <= state_dim) {
        store4(to, sum[i]);
      } else {  // padding stays zero
        to[0] = sum[i].x;
        if (n + 1 < state_dim) to[1] = sum[i].y;
        if (n + 2 < state_dim) to[2] = sum[i].z;
      }
    }
  }
}

}  // namespace replayeval
