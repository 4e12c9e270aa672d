#include "reports/state_dump.h"

#include <algorithm>
#include <stdexcept>

#include "reports/files.h"
#include "reports/hdf5_image.h"

namespace replayeval {
namespace {

constexpr const char* kDumpSchema = "replayeval-states/1";

struct Field {
  const char* name;
  std::vector<float> LayerDump::*values;
  std::vector<int64_t> (*dims)(const LayerDump&);
};

std::vector<int64_t> per_head_dim(const LayerDump& l) { return {l.tokens, l.heads, l.head_dim}; }
std::vector<int64_t> per_group(const LayerDump& l) { return {l.tokens, l.groups, l.state_dim}; }
std::vector<int64_t> per_head(const LayerDump& l) { return {l.tokens, l.heads}; }

const Field kFields[] = {
    {"state", &LayerDump::state,
     [](const LayerDump& l) {
       return std::vector<int64_t>{l.heads, l.head_dim, l.state_dim};
     }},
    {"x", &LayerDump::x, per_head_dim},
    {"b", &LayerDump::b, per_group},
    {"c", &LayerDump::c, per_group},
    {"dt", &LayerDump::dt, per_head},
    {"q", &LayerDump::q, per_group},
    {"k", &LayerDump::k, per_group},
    {"v", &LayerDump::v, per_head_dim},
    {"beta", &LayerDump::beta, per_head},
    {"decay_log2", &LayerDump::decay_log2,
     [](const LayerDump& l) {
       if (l.kind == "mamba2") return std::vector<int64_t>{l.heads};
       if (l.kind == "kda") return std::vector<int64_t>{l.tokens, l.heads, l.state_dim};
       return std::vector<int64_t>{l.tokens, l.heads};
     }},
};

int64_t product(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (int64_t d : dims) count *= d;
  return count;
}

}  // namespace

void write_state_dump(const StateDump& dump, const std::filesystem::path& path) {
  Hdf5Writer writer(path.string());
  writer.group("/layers");
  writer.attribute<std::string>("/", "schema", kDumpSchema);
  writer.attribute<std::string>("/", "model_sha256", dump.model_sha256);
  writer.attribute<std::string>("/", "document", dump.document);
  writer.attribute<int64_t>("/", "position", dump.position);
  for (const LayerDump& layer : dump.layers) {
    const std::string group = "/layers/" + std::to_string(layer.layer);
    writer.group(group);
    writer.attribute<std::string>(group, "kind", layer.kind);
    for (const auto& [name, value] : {std::pair<const char*, int>{"heads", layer.heads},
                                      {"head_dim", layer.head_dim},
                                      {"state_dim", layer.state_dim},
                                      {"groups", layer.groups},
                                      {"tokens", layer.tokens}}) {
      writer.attribute<int64_t>(group, name, value);
    }
    for (const Field& field : kFields) {
      const std::vector<float>& values = layer.*field.values;
      if (values.empty()) continue;
      const std::vector<int64_t> dims = field.dims(layer);
      if (product(dims) != static_cast<int64_t>(values.size())) {
        throw std::runtime_error(path.string() + ": " + group + "/" + field.name + ": expected " +
                                 std::to_string(product(dims)) + " values, got " +
                                 std::to_string(values.size()));
      }
      writer.dataset<float>(group + "/" + field.name, dims, values);
    }
  }
  std::filesystem::create_directories(path.parent_path());
  replace_file(path, writer.finish());
}

StateDump read_state_dump(const std::filesystem::path& path) {
  const std::optional<std::vector<std::byte>> bytes = read_file(path);
  if (!bytes) throw std::runtime_error(path.string() + ": does not exist");
  const Hdf5Reader reader(path.string(), *bytes);
  if (!reader.has_attribute("/", "schema") ||
      reader.attribute<std::string>("/", "schema") != kDumpSchema) {
    throw std::runtime_error(path.string() + ": expected a state dump, schema " + kDumpSchema);
  }
  StateDump dump;
  dump.model_sha256 = reader.attribute<std::string>("/", "model_sha256");
  dump.document = reader.attribute<std::string>("/", "document");
  dump.position = reader.attribute<int64_t>("/", "position");
  for (const std::string& name : reader.members("/layers")) {
    const std::string group = "/layers/" + name;
    LayerDump layer;
    layer.layer = std::stoi(name);
    layer.kind = reader.attribute<std::string>(group, "kind");
    auto size = [&](const char* what) {
      return static_cast<int>(reader.attribute<int64_t>(group, what));
    };
    layer.heads = size("heads");
    layer.head_dim = size("head_dim");
    layer.state_dim = size("state_dim");
    layer.groups = size("groups");
    layer.tokens = size("tokens");
    for (const Field& field : kFields) {
      const std::string dataset = group + "/" + field.name;
      if (!reader.has(dataset)) continue;
      if (reader.dims(dataset) != field.dims(layer)) {
        throw std::runtime_error(path.string() + ": " + dataset +
                                 ": its shape does not fit the layer's attributes");
      }
      layer.*field.values = reader.dataset<float>(dataset);
    }
    if (layer.state.empty())
      throw std::runtime_error(path.string() + ": " + group + "/state: missing");
    dump.layers.push_back(std::move(layer));
  }
  std::sort(dump.layers.begin(), dump.layers.end(),
            [](const LayerDump& a, const LayerDump& b) { return a.layer < b.layer; });
  return dump;
}

std::vector<StateDump> read_state_dumps(const std::filesystem::path& path) {
  std::filesystem::path root = path;
  if (std::filesystem::is_directory(path / "dumps")) root = path / "dumps";
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(root)) {
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      if (entry.path().extension() == ".h5") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  if (files.empty())
    throw std::runtime_error(path.string() +
                             ": no state dumps (*.h5); a run writes them with dump_states");
  std::vector<StateDump> dumps;
  for (const std::filesystem::path& file : files) dumps.push_back(read_state_dump(file));
  return dumps;
}

}  // namespace replayeval
