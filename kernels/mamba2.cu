// Mamba-2 replay on the device (mamba2_cuda.h). A block walks one head of one row through all
// windows of the call. Inside a window: products B_j . C_t and their decays, reads of the
// checkpoint for all queries at once, outputs, the fold. Rows that mamba2_rows.cuh takes go there.
#include "kernels/mamba2_block.cuh"
#include "kernels/mamba2_checks.h"
#include "kernels/mamba2_cuda.h"
#include "kernels/mamba2_rows.cuh"
#include "kernels/replay_cuda.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 512;

/// Offsets, in floats, of a block's arrays; the matrices apart, since they may lie in global
/// memory.
struct Mamba2Layout {
  int row;    // row stride of the matrices
  int p_row;  // of x, u, z
  int n_row;  // of B, C
  int w_row;  // of the weights
  int x, b, c, weights, z, new_z, dt, decay, carry, fold, end;
  int state, read, matrices_end;

  __host__ __device__ Mamba2Layout(int head_dim, int state_dim, int records, bool separate) {
    row = padded_row(state_dim);
    p_row = (head_dim + 3) / 4 * 4;
    n_row = (state_dim + 15) / 16 * 16 + 4;
    w_row = records + 1;
    int at = 0;
    const auto take = [&at](int count) {
      const int from = at;
      at += (count + 3) / 4 * 4;
      return from;
    };
    x = take(records * p_row);
    b = take(records * n_row);
    c = take(records * n_row);
    weights = take(records * w_row);
    z = take(records * p_row);
    new_z = take(p_row);
    dt = take(records);
    decay = take(records);
    carry = take(records);
    fold = take(records);
    end = at;
    at = 0;
    state = take(head_dim * row);
    read = separate ? take(head_dim * row) : state;
    matrices_end = at;
  }
};

struct Mamba2Launch {
  ReplayTables tables;
  Mamba2Layer layer;
  const Mamba2Inputs* inputs;
  const int* rows;  // of the launch
  LayerStep step;
  int records;      // capacity of a span
  bool separate;    // room for read checkpoints
  float* matrices;  // null: shared memory; else [blocks of the launch, matrices_end]
  float* spare;     // residuals: [blocks of the launch, elements]
};

struct Mamba2Span {
  const Mamba2Launch* launch;
  DeviceHead* head;
  const Mamba2Inputs* in;
  float* work;
  Mamba2Layout at;

  /// Outputs of one span, and the fold into the head's state if it flushes.
  __device__ void operator()(const WalkSpan& span) const {
    const Mamba2Layer& layer = launch->layer;
    const DevicePlan& plan = *head->plan;
    const int head_dim = layer.head_dim, state_dim = layer.state_dim, tid = threadIdx.x;
    const int records = span.records, queries = span.queries(), first_query = records - queries;
    const bool read_new = span.flush && queries > 0 && plan.flush_output == FlushOutput::recurrence;
    const int window_queries = queries - (read_new ? 1 : 0);
    const int group = head->head / (layer.heads / layer.groups);
    float *x = work + at.x, *b = work + at.b, *c = work + at.c, *weights = work + at.weights,
          *z = work + at.z;
    float *dt = work + at.dt, *decay = work + at.decay, *carry = work + at.carry,
          *fold = work + at.fold;

    if (window_queries > 0) {
      if (span.from_unencoded) {
        head->need_state();
      } else {
        head->need_read();
      }
    }
    if (span.flush) head->need_state();
    const float* read = span.from_unencoded ? head->state.x : head->read.x;

    // Inputs; columns of B and C past state_dim are zeros.
    const int64_t first = span.first;
    for (int i = tid; i < records * at.p_row; i += kThreads) {
      const int j = i / at.p_row, p = i % at.p_row;
      x[i] = p < head_dim ? in->x[(first + j) * in->x_stride + int64_t{head->head} * head_dim + p]
                          : 0.0f;
    }
    for (int i = tid; i < records * at.n_row; i += kThreads) {
      const int j = i / at.n_row, n = i % at.n_row;
      b[i] =
          n < state_dim ? in->b[(first + j) * in->b_stride + int64_t{group} * state_dim + n] : 0.0f;
    }
    for (int i = tid; i < queries * at.n_row; i += kThreads) {
      const int q = i / at.n_row, n = i % at.n_row;
      c[i] = n < state_dim ? in->c[(int64_t{span.first_query} + q) * in->c_stride +
                                   int64_t{group} * state_dim + n]
                           : 0.0f;
    }
    for (int j = tid; j < records; j += kThreads) {
      dt[j] = in->dt[(first + j) * in->dt_stride + head->head];
      decay[j] = dt[j] * layer.decay_log2[head->head];
    }
    __syncthreads();

    // Weights 2^D(j, t) dt_j, D summed from each record's own start; those of the last record are
    // the fold's.
    for (int i = tid; i < (window_queries + 1) * records; i += kThreads) {
      const int q = i / records, j = i % records;
      const int t = q < window_queries ? first_query + q : records - 1;
      if (j > t || (q == window_queries && !span.flush)) continue;
      float sum = 0.0f;
      for (int k = j + 1; k <= t; ++k) sum = sum + decay[k];
      const float weight = exp2_ordered(sum) * dt[j];
      if (q < window_queries) {
        weights[q * at.w_row + j] = weight;
      } else {
        fold[j] = weight;
      }
    }
    for (int t = tid; t < records; t += kThreads) {
      float sum = 0.0f;
      for (int k = 0; k <= t; ++k) sum = sum + decay[k];
      carry[t] = exp2_ordered(sum);
    }
    const int n16 = (state_dim + 15) / 16;
    if (window_queries > 0) {
      dot_rows(read, at.row, head_dim, c, at.n_row, window_queries, n16, z, at.p_row);
      __syncthreads();
      // times B_j . C_t: one dot product for every group of four threads.
      const int part = tid & 3;
      const int pairs = window_queries * records;
      for (int base = 0; base < pairs; base += kThreads / 4) {
        const int i = min(base + (tid >> 2), pairs - 1);
        const int q = i / records, j = i % records;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int m = 0; m < n16; ++m) {
          sum = fma4(load4(b + j * at.n_row + 16 * m + 4 * part),
                     load4(c + q * at.n_row + 16 * m + 4 * part), sum);
        }
        const float product = sum_of_lanes(sum);
        if (part == 0 && base + (tid >> 2) < pairs && j <= first_query + q)
          weights[q * at.w_row + j] *= product;
      }
      __syncthreads();
      for (int i = tid; i < window_queries * head_dim; i += kThreads) {
        const int q = i / head_dim, p = i % head_dim, t = first_query + q;
        float sum = carry[t] * z[q * at.p_row + p];
        for (int j = 0; j <= t; ++j)
          sum = __fmaf_rn(weights[q * at.w_row + j], x[j * at.p_row + p], sum);
        output(span, t, p, sum, x);
      }
    }
    if (!span.flush) {
      __syncthreads();
      return;
    }

    // The fold's left operands go over z, which has been read.
    __syncthreads();
    const bool exact = plan.dot == DotType::fp32;
    for (int i = tid; i < records * at.p_row; i += kThreads) {
      z[i] = exact ? fold[i / at.p_row] * x[i] : round_operand_device(plan.dot, x[i]);
    }
    if (!exact) {
      for (int i = tid; i < records * at.n_row; i += kThreads) {
        b[i] = round_operand_device(plan.dot, fold[i / at.n_row] * b[i]);
      }
    }
    __syncthreads();
    fold_state(head->state.x, at.row, head_dim, state_dim, carry[records - 1], z, at.p_row, b,
               at.n_row, records);
    __syncthreads();
    if (!read_new) return;
    float* new_z = work + at.new_z;
    dot_rows(head->state.x, at.row, head_dim, c + (queries - 1) * at.n_row, at.n_row, 1, n16, new_z,
             at.p_row);
    __syncthreads();
    for (int p = tid; p < head_dim; p += kThreads) output(span, records - 1, p, new_z[p], x);
    __syncthreads();
  }

  __device__ void output(const WalkSpan& span, int t, int p, float sum, const float* x) const {
    const Mamba2Layer& layer = launch->layer;
    if (layer.skip) sum = __fmaf_rn(layer.skip[head->head], x[t * at.p_row + p], sum);
    in->y[(int64_t{span.first} + t) * in->y_stride + int64_t{head->head} * layer.head_dim + p] =
        sum;
  }
};

__global__ void __launch_bounds__(kThreads)
    mamba2_walk(const __grid_constant__ Mamba2Launch launch) {
  extern __shared__ __align__(16) std::byte shared[];
  const Mamba2Layer& layer = launch.layer;
  const int row = launch.step.pass == LayerPass::none ? launch.rows[blockIdx.y] : launch.step.row;
  DeviceHead head;
  int pending = 0;
  if (!bind_head(launch.tables, launch.step, static_cast<int>(blockIdx.x), row, &head, &pending))
    return;
  const Mamba2Inputs& in = launch.inputs[row];
  const SpanWalk walk(pending, head.plan->window, in.tokens, launch.tables.mode,
                      head.plan->flush_output);
  const Mamba2Layout at(layer.head_dim, layer.state_dim, launch.records, launch.separate);
  const size_t block = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  head.codec = reinterpret_cast<BlockCodecMemory*>(shared);
  float* work = reinterpret_cast<float*>(shared + block_codec_bytes(layer.head_dim));
  float* matrices = launch.matrices ? launch.matrices + block * at.matrices_end : work + at.end;
  head.head_dim = layer.head_dim;
  head.state_dim = layer.state_dim;
  head.state = {matrices + at.state, at.row, 1};
  head.read = head.shared() ? head.state : MatrixView{matrices + at.read, at.row, 1};
  head.spare = launch.spare ? launch.spare + block * layer.head_dim * layer.state_dim : nullptr;
  // Columns past state_dim take part in dot products as zeros.
  for (int i = threadIdx.x; i < at.matrices_end; i += kThreads) matrices[i] = 0.0f;
  __syncthreads();
  walk_head(head, walk, launch.step, Mamba2Span{&launch, &head, &in, work, at});
}

int window_threads(int head_dim) { return (kRowThreads * ((head_dim + 1) / 2) + 31) / 32 * 32; }

size_t rows_shared(int head_dim, int threads, int buffers, int matrices) {
  return static_cast<size_t>(Mamba2RowLayout(head_dim, threads, buffers, matrices).end) *
         sizeof(float);
}

/// Launches of the rows whose state stays in registers, beside each other.
void run_rows(const Mamba2RowLaunch& launch, const RowGroups& groups, cudaStream_t stream) {
  const int head_dim = launch.layer.head_dim;
  const size_t eager = groups.eager.size(), separate = groups.separate.size(),
               shared = groups.shared.size();
  SideStreams* side = std::max({eager, separate, shared}) < eager + separate + shared
                          ? &SideStreams::current()
                          : nullptr;
  if (side) side->fork(stream);
  Mamba2RowLaunch own = launch;
  const auto start = [&](void (*kernel)(Mamba2RowLaunch), size_t rows, int blocks, int threads,
                         size_t bytes, cudaStream_t where) {
    if (rows == 0) return;
    const dim3 grid(static_cast<unsigned>(launch.layer.heads * blocks),
                    static_cast<unsigned>(rows));
    launch_clusters(kernel, own, grid, blocks, threads, bytes, where);
    own.rows += rows;
  };
  const int narrow = window_threads(head_dim);
  const size_t shared_bytes = rows_shared(head_dim, narrow, 1, 1);
  const int blocks = has_clusters() && head_dim > 32 ? 2 : 1,
            block_rows = mamba2_block_rows(head_dim, blocks),
            threads = (kRowThreads * block_rows + 31) / 32 * 32;
  if (threads <= kMamba2RowThreads) {
    start(mamba2_eager, eager, blocks, threads, rows_shared(block_rows, threads, 2, 0), stream);
  } else {  // no clusters
    start(mamba2_windows, eager, 1, narrow, shared_bytes, stream);
  }
  start(mamba2_windows, separate, 1, narrow, rows_shared(head_dim, narrow, 1, 2),
        side ? (*side)[0] : stream);
  start(mamba2_windows, shared, 1, narrow, shared_bytes, side ? (*side)[1] : stream);
  if (side) side->join(stream);
}

void run(const Mamba2Layer& layer, std::span<const StateRow> rows,
         std::span<const Mamba2Inputs> inputs, WalkMode mode, cudaStream_t stream) {
  if (rows.empty()) return;
  const StateShape shape{layer.head_dim, layer.state_dim};
  RowTables row_tables(rows, shape, layer.heads, layer.layer, layer.head_offset, mode);
  std::vector<int> tokens;
  for (const Mamba2Inputs& in : inputs) tokens.push_back(in.tokens);
  const bool narrow =
      layer.head_dim <= kMamba2MostRows &&
      block_shared_limit() >= rows_shared(layer.head_dim, window_threads(layer.head_dim), 1, 2);
  const RowGroups groups(rows, layer.state_dim, mode, [&](int) { return narrow; });
  CallTables tables(stream);
  row_tables.add_to(&tables);
  const size_t inputs_at = tables.add(inputs);
  const size_t fast_at = tables.add(std::span<const int>(groups.fast()));
  const size_t general_at = tables.add(std::span<const int>(groups.general));
  std::vector<StateRow> general_rows;
  std::vector<int> general_tokens;
  for (int r : groups.general) {
    general_rows.push_back(rows[static_cast<size_t>(r)]);
    general_tokens.push_back(tokens[static_cast<size_t>(r)]);
  }
  Mamba2Launch launch{};
  launch.layer = layer;
  launch.records = largest_span(general_rows, general_tokens, mode);
  launch.separate = std::any_of(general_rows.begin(), general_rows.end(), has_own_read);
  const Mamba2Layout at(layer.head_dim, layer.state_dim, launch.records, launch.separate);
  size_t shared = block_codec_bytes(layer.head_dim) + static_cast<size_t>(at.end) * sizeof(float);
  const size_t matrices = static_cast<size_t>(at.matrices_end) * sizeof(float),
               limit = block_shared_limit();
  const bool in_shared = shared + matrices <= limit;
  if (in_shared) shared += matrices;
  if (shared > limit) {
    throw std::invalid_argument("mamba2: a window of " + std::to_string(launch.records) +
                                " records of head_dim " + std::to_string(layer.head_dim) +
                                ", state_dim " + std::to_string(layer.state_dim) + " needs " +
                                std::to_string(shared) + " bytes of shared memory, this GPU has " +
                                std::to_string(limit) + "; a shorter window needs less");
  }
  const size_t blocks = general_rows.size() * static_cast<size_t>(layer.heads);
  const size_t elements = static_cast<size_t>(shape.elements());
  const size_t matrices_at = in_shared ? 0 : tables.reserve(blocks * matrices);
  const size_t spare_at =
      row_tables.any_residual() ? tables.reserve(blocks * elements * sizeof(float)) : 0;
  const bool passes = !row_tables.layer_plans().empty();
  const size_t unencoded_at =
      passes ? tables.reserve(static_cast<size_t>(layer.heads) * elements * sizeof(float)) : 0;
  const size_t amax_at = passes ? tables.reserve(sizeof(uint32_t)) : 0;
  tables.upload();
  launch.tables = row_tables.on_device(tables);
  launch.inputs = tables.table<const Mamba2Inputs>(inputs_at);
  run_rows({launch.tables, layer, launch.inputs, tables.table<const int>(fast_at)}, groups, stream);
  if (general_rows.empty()) return;
  launch.rows = tables.table<const int>(general_at);
  launch.matrices = in_shared ? nullptr : tables.scratch<float>(matrices_at);
  launch.spare = row_tables.any_residual() ? tables.scratch<float>(spare_at) : nullptr;
  CUDA_CHECK(cudaFuncSetAttribute(mamba2_walk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared)));
  launch_passes(row_tables, rows, tokens, mode,
                passes ? tables.scratch<float>(unencoded_at) : nullptr,
                passes ? tables.scratch<uint32_t>(amax_at) : nullptr, stream,
                [&](const LayerStep& step, int count) {
                  launch.step = step;
                  if (step.pass == LayerPass::none) count = static_cast<int>(general_rows.size());
                  const dim3 grid(static_cast<unsigned>(layer.heads), static_cast<unsigned>(count));
                  mamba2_walk<<<grid, kThreads, shared, stream>>>(launch);
                  CUDA_CHECK(cudaGetLastError());
                });
}

}  // namespace

void mamba2_advance_cuda(const Mamba2Layer& layer, std::span<StateRow> rows,
                         std::span<const Mamba2Inputs> inputs, AdvanceMode mode,
                         CudaStream stream) {
  check_mamba2_layer(layer, rows, inputs);
  std::vector<std::vector<int>> pending(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const int tokens = inputs[r].tokens;
    if (tokens < 0) {
      throw std::invalid_argument("mamba2: row " + std::to_string(r) + ": " +
                                  std::to_string(tokens) + " tokens, expected 0 or more");
    }
    if (tokens > 0) check_mamba2_inputs(layer, r, inputs[r], true, true);
    pending[r] = pending_after(rows[r], tokens, mode);
  }
  run(layer, rows, inputs, mode == AdvanceMode::commit ? WalkMode::commit : WalkMode::verify,
      stream);
  for (size_t r = 0; r < rows.size(); ++r)
    std::copy(pending[r].begin(), pending[r].end(), rows[r].pending);
}

void mamba2_flush_cuda(const Mamba2Layer& layer, std::span<StateRow> rows,
                       std::span<const Mamba2Inputs> inputs, CudaStream stream) {
  check_mamba2_layer(layer, rows, inputs);
  for (size_t r = 0; r < rows.size(); ++r) {
    const bool any = std::any_of(rows[r].pending, rows[r].pending + rows[r].plans.size(),
                                 [](int h) { return h > 0; });
    if (any) check_mamba2_inputs(layer, r, inputs[r], true, false);
  }
  run(layer, rows, inputs, WalkMode::flush, stream);
  for (StateRow& row : rows) std::fill_n(row.pending, row.plans.size(), 0);
}

}  // namespace replayeval
