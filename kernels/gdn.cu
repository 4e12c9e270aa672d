// GDN and KDA replay on the device (gdn_cuda.h). A block walks one value head of one row through
// all windows of the call. The state is kept as on the host's fast path, [state_dim, head_dim] with
// head_dim contiguous, so that every sum over state_dim or over records is one chain of fused
// multiply-adds in one thread. Rows that gdn_rows.cuh takes go there.
#include "kernels/gdn_block.cuh"
#include "kernels/gdn_checks.h"
#include "kernels/gdn_cuda.h"
#include "kernels/gdn_rows.cuh"
#include "kernels/replay_cuda.cuh"

namespace replayeval {
namespace {

constexpr int kThreads = 512;

struct GdnLaunch {
  ReplayTables tables;
  GdnLayer layer;
  float query_scale;
  const GdnInputs* inputs;
  const int* rows;  // of the launch
  LayerStep step;
  int records;
  bool separate;
  float* matrices;  // null: shared memory
  float* work;      // null: shared memory; else [blocks, end]
  float* spare;
};

/// Inputs of a row as the caller laid them out; token 0 is the call's first.
struct RowInputs {
  const GdnLayer* layer;
  const GdnInputs* in;
  int head, key_head;

  __device__ float k(int64_t t, int n) const {
    return in->k[t * in->k_stride + int64_t{key_head} * layer->key_dim + n];
  }
  __device__ float q(int64_t t, int n) const {
    return in->q[t * in->q_stride + int64_t{key_head} * layer->key_dim + n];
  }
  __device__ float v(int64_t t, int p) const {
    return in->v[t * in->v_stride + int64_t{head} * layer->value_dim + p];
  }
  __device__ float beta(int64_t t) const { return in->beta[t * in->beta_stride + head]; }
  __device__ float decay(int64_t t, int n) const {
    return layer->channel_decay
               ? in->decay_log2[t * in->decay_stride + int64_t{head} * layer->key_dim + n]
               : in->decay_log2[t * in->decay_stride + head];
  }
  __device__ float u(int64_t t, int p) const {
    return in->u[t * in->u_stride + int64_t{head} * layer->value_dim + p];
  }
  __device__ void store_u(int64_t t, int p, float u) const {
    in->u[t * in->u_stride + int64_t{head} * layer->value_dim + p] = u;
  }
  __device__ void store_o(int64_t t, int p, float o) const {
    in->o[t * in->o_stride + int64_t{head} * layer->value_dim + p] = o;
  }
};

__global__ void __launch_bounds__(kThreads) gdn_walk(const __grid_constant__ GdnLaunch launch) {
  extern __shared__ __align__(16) std::byte shared[];
  const GdnLayer& layer = launch.layer;
  const int row = launch.step.pass == LayerPass::none ? launch.rows[blockIdx.y] : launch.step.row;
  DeviceHead head;
  int pending = 0;
  if (!bind_head(launch.tables, launch.step, static_cast<int>(blockIdx.x), row, &head, &pending))
    return;
  const GdnInputs& in = launch.inputs[row];
  const SpanWalk walk(pending, head.plan->window, in.tokens, launch.tables.mode,
                      head.plan->flush_output);
  const GdnLayout at(layer.value_dim, layer.key_dim, launch.records, layer.channel_decay,
                     launch.separate);
  const size_t block = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  head.codec = reinterpret_cast<BlockCodecMemory*>(shared);
  float* own = reinterpret_cast<float*>(shared + block_codec_bytes(layer.value_dim));
  float* work = launch.work ? launch.work + block * at.end : own;
  float* matrices = launch.matrices ? launch.matrices + block * at.matrices_end
                    : launch.work   ? own
                                    : own + at.end;
  head.head_dim = layer.value_dim;
  head.state_dim = layer.key_dim;
  head.state = {matrices + at.state, 1, at.v_row};
  head.read = head.shared() ? head.state : MatrixView{matrices + at.read, 1, at.v_row};
  head.spare = launch.spare ? launch.spare + block * layer.value_dim * layer.key_dim : nullptr;
  // Columns past value_dim are computed and never used; they must not be anything at all.
  for (int i = threadIdx.x; i < at.matrices_end; i += kThreads) matrices[i] = 0.0f;
  for (int i = threadIdx.x; i < at.end; i += kThreads) work[i] = 0.0f;
  __syncthreads();
  const int key_head = head.head / (layer.value_heads / layer.key_heads);
  walk_head(head, walk, launch.step,
            GdnSpan<RowInputs>{&layer, launch.query_scale, &head,
                               RowInputs{&layer, &in, head.head, key_head}, work, at});
}

size_t gdn_rows_shared(int buffers, int matrices) {
  return static_cast<size_t>(GdnRowLayout(buffers, matrices).end) * sizeof(float);
}

/// A block has `block_rows` rows of a head.
void launch_rows(void (*kernel)(GdnRowLaunch), const GdnRowLaunch& launch, int rows, int block_rows,
                 int threads, size_t shared, cudaStream_t stream) {
  if (rows == 0) return;
  const int blocks = (launch.layer.value_dim + block_rows - 1) / block_rows;
  const dim3 grid(static_cast<unsigned>(launch.layer.value_heads * blocks),
                  static_cast<unsigned>(rows));
  launch_clusters(kernel, launch, grid, blocks, threads, shared, stream);
}

/// Launches of the rows whose state stays in registers, beside each other.
void run_rows(const GdnRowLaunch& launch, const RowGroups& groups, cudaStream_t stream) {
  const int eager = static_cast<int>(groups.eager.size()),
            separate = static_cast<int>(groups.separate.size()),
            shared = static_cast<int>(groups.shared.size());
  SideStreams* side = std::max({eager, separate, shared}) < eager + separate + shared
                          ? &SideStreams::current()
                          : nullptr;
  if (side) side->fork(stream);
  GdnRowLaunch own = launch;
  const int eager_rows = has_clusters() ? kGdnEagerRows : kGdnRows;
  launch_rows(gdn_eager, own, eager, eager_rows, kRowThreads * eager_rows, gdn_rows_shared(2, 0),
              stream);
  own.rows += eager;
  launch_rows(gdn_windows, own, separate, kGdnRows, kGdnWindowThreads, gdn_rows_shared(1, 2),
              side ? (*side)[0] : stream);
  own.rows += separate;
  launch_rows(gdn_windows, own, shared, kGdnRows, kGdnWindowThreads, gdn_rows_shared(1, 1),
              side ? (*side)[1] : stream);
  if (side) side->join(stream);
}

/// Whether the current device runs gdn_rows.cuh's kernels for the layer.
bool takes_rows(const GdnLayer& layer) {
  return !layer.channel_decay && layer.value_dim <= 2 * kGdnRows &&
         block_shared_limit() >= gdn_rows_shared(1, 2) &&
         (layer.value_dim <= kGdnRows || has_clusters());
}

void run(const GdnLayer& layer, std::span<const StateRow> rows, std::span<const GdnInputs> inputs,
         WalkMode mode, cudaStream_t stream) {
  if (rows.empty()) return;
  const StateShape shape{layer.value_dim, layer.key_dim};
  RowTables row_tables(rows, shape, layer.value_heads, layer.layer, layer.head_offset, mode);
  std::vector<int> tokens;
  for (const GdnInputs& in : inputs) tokens.push_back(in.tokens);
  const bool takes = takes_rows(layer);
  const RowGroups groups(rows, layer.key_dim, mode, [&](int) { return takes; });
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
  GdnLaunch launch{};
  launch.layer = layer;
  launch.query_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(layer.key_dim)));
  launch.records = largest_span(general_rows, general_tokens, mode);
  launch.separate = std::any_of(general_rows.begin(), general_rows.end(), has_own_read);
  const GdnLayout at(layer.value_dim, layer.key_dim, launch.records, layer.channel_decay,
                     launch.separate);
  // What fits goes into shared memory: all, else the matrices' neighbours, else the matrices, else
  // nothing.
  const size_t codec = block_codec_bytes(layer.value_dim), limit = block_shared_limit();
  const size_t work = static_cast<size_t>(at.end) * sizeof(float);
  const size_t matrices = static_cast<size_t>(at.matrices_end) * sizeof(float);
  const bool work_in = codec + work <= limit;
  const bool matrices_in = codec + matrices + (work_in ? work : 0) <= limit;
  const size_t shared = codec + (work_in ? work : 0) + (matrices_in ? matrices : 0);
  const size_t blocks = general_rows.size() * static_cast<size_t>(layer.value_heads);
  const size_t elements = static_cast<size_t>(shape.elements());
  const size_t matrices_at = matrices_in ? 0 : tables.reserve(blocks * matrices);
  const size_t work_at = work_in ? 0 : tables.reserve(blocks * work);
  const size_t spare_at =
      row_tables.any_residual() ? tables.reserve(blocks * elements * sizeof(float)) : 0;
  const bool passes = !row_tables.layer_plans().empty();
  const size_t unencoded_at =
      passes ? tables.reserve(static_cast<size_t>(layer.value_heads) * elements * sizeof(float))
             : 0;
  const size_t amax_at = passes ? tables.reserve(sizeof(uint32_t)) : 0;
  tables.upload();
  launch.tables = row_tables.on_device(tables);
  launch.inputs = tables.table<const GdnInputs>(inputs_at);
  run_rows(
      {launch.tables, layer, launch.query_scale, launch.inputs, tables.table<const int>(fast_at)},
      groups, stream);
  if (general_rows.empty()) return;
  launch.rows = tables.table<const int>(general_at);
  launch.matrices = matrices_in ? nullptr : tables.scratch<float>(matrices_at);
  launch.work = work_in ? nullptr : tables.scratch<float>(work_at);
  launch.spare = row_tables.any_residual() ? tables.scratch<float>(spare_at) : nullptr;
  CUDA_CHECK(cudaFuncSetAttribute(gdn_walk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared)));
  launch_passes(
      row_tables, rows, tokens, mode, passes ? tables.scratch<float>(unencoded_at) : nullptr,
      passes ? tables.scratch<uint32_t>(amax_at) : nullptr, stream,
      [&](const LayerStep& step, int count) {
        launch.step = step;
        if (step.pass == LayerPass::none) count = static_cast<int>(general_rows.size());
        const dim3 grid(static_cast<unsigned>(layer.value_heads), static_cast<unsigned>(count));
        gdn_walk<<<grid, kThreads, shared, stream>>>(launch);
        CUDA_CHECK(cudaGetLastError());
      });
}

}  // namespace

void gdn_advance_cuda(const GdnLayer& layer, std::span<StateRow> rows,
                      std::span<const GdnInputs> inputs, AdvanceMode mode, CudaStream stream) {
  check_gdn_layer(layer);
  check_rows("gdn", rows, inputs.size(), layer.value_heads, {layer.value_dim, layer.key_dim});
  check_gdn_inputs(inputs, true);
  std::vector<std::vector<int>> pending(rows.size());
  for (size_t r = 0; r < rows.size(); ++r)
    pending[r] = pending_after(rows[r], inputs[r].tokens, mode);
  run(layer, rows, inputs, mode == AdvanceMode::commit ? WalkMode::commit : WalkMode::verify,
      stream);
  for (size_t r = 0; r < rows.size(); ++r)
    std::copy(pending[r].begin(), pending[r].end(), rows[r].pending);
}

void gdn_flush_cuda(const GdnLayer& layer, std::span<StateRow> rows,
                    std::span<const GdnInputs> inputs, CudaStream stream) {
  check_gdn_layer(layer);
  check_rows("gdn", rows, inputs.size(), layer.value_heads, {layer.value_dim, layer.key_dim});
  for (size_t r = 0; r < rows.size(); ++r) {
    const bool any = std::any_of(rows[r].pending, rows[r].pending + rows[r].plans.size(),
                                 [](int h) { return h > 0; });
    if (any) check_gdn_inputs(inputs.subspan(r, 1), false);
  }
  run(layer, rows, inputs, WalkMode::flush, stream);
  for (StateRow& row : rows) std::fill_n(row.pending, row.plans.size(), 0);
}

}  // namespace replayeval
