// Checkpoint files: every dtype, single and sharded, every way a file can be wrong, quantized
// weights against values worked out by hand, the hash, and the hub cache.
#include "models/checkpoint.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/hub.h"
#include "models/safetensors.h"
#include "tests/models/checkpoint_files.h"
#include "tests/support/case_file.h"

using namespace replayeval;
using namespace replayeval::test;
namespace fs = std::filesystem;

namespace {

std::string failure(const auto& call) { return message_of<std::runtime_error>(call); }
std::string refusal(const auto& call) { return message_of<std::invalid_argument>(call); }

template <class T>
TensorSource source(std::string name, TensorType type, std::vector<int64_t> shape,
                    const std::vector<T>& data) {
  return {{std::move(name), type, std::move(shape)}, data.data()};
}

/// A folder with config.json and model.safetensors.
struct ModelFolder {
  TemporaryFolder folder;
  explicit ModelFolder(std::string_view config, std::initializer_list<TensorSource> tensors) {
    write_file(folder / "config.json", config);
    write_safetensors(folder / "model.safetensors", std::span(tensors.begin(), tensors.size()));
  }
  std::shared_ptr<const Checkpoint> open(WeightType type = WeightType::fp32) const {
    return Checkpoint::open(folder.path(), type);
  }
  std::string file() const { return (folder / "model.safetensors").string(); }
};

std::vector<float> floats_of(const WeightView& view) {
  std::vector<float> out;
  for (int64_t r = 0; r < view.rows; ++r) {
    for (int64_t c = 0; c < view.cols; ++c) {
      const auto* at = static_cast<const std::byte*>(view.data) +
                       (r * view.stride + c) * weight_bytes(view.type);
      const TensorType type = view.type == WeightType::fp32   ? TensorType::f32
                              : view.type == WeightType::bf16 ? TensorType::bf16
                                                              : TensorType::f16;
      float value = 0;
      widen_to_floats(type, at, 1, &value);
      out.push_back(value);
    }
  }
  return out;
}

bool within(const WeightView& view, const Checkpoint& checkpoint) {
  for (const Shard& shard : checkpoint.tensors().shards()) {
    const auto* data = static_cast<const std::byte*>(view.data);
    if (data >= shard.file.data() && data < shard.file.data() + shard.file.size()) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("every dtype, written and read") {
  TemporaryFolder folder;
  const std::vector<double> f64 = {1.0 / 3.0, -1e300};
  const std::vector<float> f32 = {1.5f, -0.0f, 3.0e-39f};
  const std::vector<uint16_t> f16 = {0x3C00, 0xC000, 0x0001, 0x7BFF,
                                     0x7C00};  // 1, -2, 2^-24, 65504, inf
  const std::vector<uint16_t> bf16 = {0x3F80, 0xC040, 0x0001, 0x7F7F,
                                      0xFF80};                       // 1, -3, 2^-133, max, -inf
  const std::vector<uint8_t> e4m3 = {0x38, 0xC0, 0x01, 0x7E, 0x7F};  // 1, -2, 2^-9, 448, NaN
  const std::vector<uint8_t> e5m2 = {0x3C, 0xC0, 0x01, 0x7B, 0x7C};  // 1, -2, 2^-16, 57344, inf
  const std::vector<int64_t> i64 = {-(int64_t{1} << 62), 7};
  const std::vector<int32_t> i32 = {-8, 9};
  const std::vector<int16_t> i16 = {-300, 300};
  const std::vector<int8_t> i8 = {-128, 127};
  const std::vector<uint8_t> u8 = {0, 255, 3};
  const std::vector<uint8_t> boolean = {1, 0};
  // u8 comes first, so that everything after it is off its alignment.
  const TensorSource sources[] = {source("u8", TensorType::u8, {3}, u8),
                                  source("f64", TensorType::f64, {2}, f64),
                                  source("f32", TensorType::f32, {3, 1}, f32),
                                  source("f16", TensorType::f16, {5}, f16),
                                  source("bf16", TensorType::bf16, {1, 5}, bf16),
                                  source("e4m3", TensorType::f8_e4m3, {5}, e4m3),
                                  source("e5m2", TensorType::f8_e5m2, {5}, e5m2),
                                  source("i64", TensorType::i64, {2}, i64),
                                  source("i32", TensorType::i32, {2}, i32),
                                  source("i16", TensorType::i16, {2}, i16),
                                  source("i8", TensorType::i8, {2}, i8),
                                  source("bool", TensorType::boolean, {2}, boolean),
                                  source("empty", TensorType::f32, {0, 4}, f32),
                                  source("scalar", TensorType::f32, {}, f32)};
  write_safetensors(folder / "a.safetensors", sources, {{"format", "pt"}});
  const Safetensors file = Safetensors::open(folder / "a.safetensors");
  CHECK(file.tensors().size() == 14);
  CHECK(file.shards().size() == 1);
  CHECK(file.shards()[0].metadata.at("format") == "pt");

  CHECK(read_floats(file.at("f64")) ==
        std::vector<float>{static_cast<float>(1.0 / 3.0), -std::numeric_limits<float>::infinity()});
  CHECK(read_floats(file.at("f32")) == f32);
  CHECK(std::signbit(read_floats(file.at("f32"))[1]));
  CHECK(file.at("f32").shape == std::vector<int64_t>{3, 1});
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(read_floats(file.at("f16")) ==
        std::vector<float>{1, -2, std::ldexp(1.0f, -24), 65504, inf});
  CHECK(read_floats(file.at("bf16")) ==
        std::vector<float>{1, -3, std::ldexp(1.0f, -133), std::ldexp(255.0f, 120), -inf});
  const std::vector<float> fp8 = read_floats(file.at("e4m3"));
  CHECK(std::vector<float>(fp8.begin(), fp8.end() - 1) ==
        std::vector<float>{1, -2, std::ldexp(1.0f, -9), 448});
  CHECK(std::isnan(fp8.back()));
  CHECK(read_floats(file.at("e5m2")) ==
        std::vector<float>{1, -2, std::ldexp(1.0f, -16), 57344, inf});
  CHECK(read_integers(file.at("i64")) == i64);
  CHECK(read_integers(file.at("i32")) == std::vector<int64_t>{-8, 9});
  CHECK(read_integers(file.at("i16")) == std::vector<int64_t>{-300, 300});
  CHECK(read_integers(file.at("i8")) == std::vector<int64_t>{-128, 127});
  CHECK(read_integers(file.at("u8")) == std::vector<int64_t>{0, 255, 3});
  CHECK(read_integers(file.at("bool")) == std::vector<int64_t>{1, 0});
  CHECK(read_floats(file.at("i16")) == std::vector<float>{-300, 300});
  CHECK(read_floats(file.at("empty")).empty());
  CHECK(read_floats(file.at("scalar")) == std::vector<float>{1.5f});
  CHECK(file.at("scalar").elements() == 1);
  CHECK(contains(refusal([&] { (void)read_integers(file.at("f32")); }),
                 "expected an integer dtype, got F32"));
  CHECK(file.find("absent") == nullptr);
  CHECK(contains(failure([&] { (void)file.at("absent"); }),
                 "a.safetensors: tensor absent: expected in the file"));
  CHECK(!fs::exists(folder / "a.safetensors.partial"));
}

TEST_CASE("the writer refuses what would not be a file") {
  TemporaryFolder folder;
  const fs::path path = folder / "w.safetensors";
  const std::vector<float> data = {1, 2};
  CHECK(contains(
      refusal([&] {
        SafetensorsWriter(path, {{"a", TensorType::f32, {2}}, {"a", TensorType::f32, {2}}});
      }),
      "tensor a: expected a new name"));
  CHECK(contains(refusal([&] {
                   SafetensorsWriter(path, {{"a", TensorType::f32, {-2}}});
                 }),
                 "F32 [-2]"));
  CHECK(contains(refusal([&] {
                   SafetensorsWriter(path, {{"a", TensorType::other, {2}}});
                 }),
                 "a known dtype"));
  {
    SafetensorsWriter writer(path, {{"a", TensorType::f32, {2}}});
    CHECK(fs::exists(folder / "w.safetensors.partial"));
    writer.append(std::as_bytes(std::span(data)).first(4));
    CHECK(contains(refusal([&] { writer.finish(); }), "expected 8 bytes of data, got 4"));
    CHECK(contains(refusal([&] { writer.append(std::as_bytes(std::span(data))); }),
                   "expected 8 bytes of data, got more"));
  }
  CHECK(fs::is_empty(folder.path()));
  CHECK(contains(failure([&] { SafetensorsWriter(folder / "no" / "w.safetensors", {}); }),
                 "cannot be written: "));
}

TEST_CASE("damaged files: one line that names file, tensor, expected and got") {
  TemporaryFolder folder;
  const fs::path path = folder / "model.safetensors";
  const auto message = [&](std::string_view bytes) {
    write_file(path, bytes);
    const std::string text = failure([&] { (void)Safetensors::open(path); });
    CHECK_MESSAGE(text.find('\n') == std::string::npos, text);
    const std::string start = path.string() + ": ";
    CHECK_MESSAGE(text.substr(0, start.size()) == start, text);
    return text.substr(std::min(start.size(), text.size()));
  };
  const auto header = [&](std::string_view text, size_t data) {
    return message(raw_safetensors(text, std::string(data, 'x')));
  };
  CHECK(message("") == "expected a safetensors file (8 bytes of header length first), got 0 bytes");
  CHECK(message("1234567") ==
        "expected a safetensors file (8 bytes of header length first), got 7 bytes");
  CHECK(message(std::string("\x10\0\0\0\0\0\0\0{}", 10)) ==
        "header: expected a length of at most 2 bytes (what the file holds), got 16; the file is "
        "truncated or is not "
        "safetensors");
  CHECK(contains(message(std::string(16, '\xFF')), "header: expected a length of at most 8 bytes"));
  CHECK(contains(header("{\"a\": ", 0), "header: expected JSON, got "));
  CHECK(header("[]", 0) == "header: expected a JSON object, got []");
  CHECK(contains(header("{\"a\":" + std::string(1000, '['), 0), "header: nested too deeply"));
  CHECK(header(R"({"a": 1})", 0) == "tensor a: expected an object, got 1");
  CHECK(header(R"({"a": {"shape": [], "data_offsets": [0, 4]}})", 4) ==
        "tensor a: dtype: expected a string, got nothing");
  CHECK(header(R"({"a": {"dtype": "F32", "data_offsets": [0, 4]}})", 4) ==
        "tensor a: shape: expected a list, got nothing");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", 4) ==
        "tensor a: shape: expected sizes, got [-1]");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}})", 4) ==
        "tensor a: shape: expected sizes, got [1.5]");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1]}})", 4) ==
        "tensor a: data_offsets: expected [begin, end], got nothing");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}})", 4) ==
        "tensor a: data_offsets: expected [begin, end], got [4]");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})", 4) ==
        "tensor a: data_offsets: expected 0 <= begin <= end, got [4,0]");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}})", 4) ==
        "tensor a: data_offsets: expected 0 <= begin <= end, got [-4,0]");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})", 7) ==
        "tensor a: expected data up to byte 8, got a file with 7 bytes of data; it is truncated, "
        "download it again");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})", 8) ==
        "tensor a: expected 3 elements of F32 for shape [3], got 8 bytes");
  CHECK(header(R"({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 7]}})", 7) ==
        "tensor a: expected 4 elements of BF16 for shape [4], got 7 bytes");
  CHECK(contains(
      header(
          R"({"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}})",
          4),
      "tensor a: shape: expected fewer elements"));
  CHECK(contains(
      header(R"({"a": {"dtype": "F64", "shape": [2305843009213693952], "data_offsets": [0, 0]}})",
             0),
      "tensor a: expected 2305843009213693952 elements of F64"));
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                   "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}})",
               6) ==
        "tensor b: expected data that begin at byte 4, where the tensor before ends, got 2; they "
        "overlap");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                   "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}})",
               12) ==
        "tensor b: expected data that begin at byte 4, where the tensor before ends, got 8");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})", 5) ==
        "expected 4 bytes of data after the header, got 5");
  CHECK(header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                   "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
               8) == "tensor a: expected once in the header, got it twice");

  // A dtype nobody knows is no error until someone reads the tensor.
  write_file(path, raw_safetensors(
                       R"({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}})", "xy"));
  const Safetensors odd = Safetensors::open(path);
  CHECK(odd.at("a").type == TensorType::other);
  CHECK(refusal([&] { (void)read_floats(odd.at("a")); }) ==
        "tensor a: expected a known dtype, got F4");
}

TEST_CASE("folders and shards") {
  TemporaryFolder folder;
  const auto open = [&] { return Safetensors::open(folder.path()); };
  const std::string index = (folder / "model.safetensors.index.json").string();
  const auto index_message = [&](std::string_view text) {
    write_file(index, text);
    const std::string message = failure(open);
    const std::string start = index + ": ";
    CHECK_MESSAGE(message.substr(0, start.size()) == start, message);
    return message.substr(std::min(start.size(), message.size()));
  };
  CHECK(failure(open) ==
        folder.path().string() +
            ": expected model.safetensors or model.safetensors.index.json, got neither");
  write_file(folder / "pytorch_model.bin", "x");
  CHECK(contains(failure(open), "got pytorch_model.bin; save it again as safetensors"));
  fs::create_symlink(folder / "gone", folder / "model.safetensors");
  CHECK(contains(failure(open), "got a link that leads nowhere (an unfinished download)"));
  fs::remove(folder / "model.safetensors");

  const std::vector<float> one = {1}, two = {2, 3}, extra = {9};
  const TensorSource first[] = {source("b", TensorType::f32, {2}, two)};
  const TensorSource second[] = {source("a", TensorType::f32, {1}, one),
                                 source("unlisted", TensorType::f32, {1}, extra)};
  write_safetensors(folder / "s-1.safetensors", first);
  write_safetensors(folder / "s-2.safetensors", second);
  CHECK(contains(index_message("nonsense"), "expected JSON, got "));
  CHECK(index_message("[]") == "weight_map: expected an object {tensor: shard file}, got nothing");
  CHECK(index_message(R"({"weight_map": [1]})") ==
        "weight_map: expected an object {tensor: shard file}, got [1]");
  CHECK(index_message(R"({"weight_map": {"a": 1}})") ==
        "weight_map: tensor a: expected a file name, got 1");
  CHECK(index_message(R"({"weight_map": {"a": "../s-2.safetensors"}})") ==
        "weight_map: expected a file beside the index, got ../s-2.safetensors");
  CHECK(contains(index_message(R"({"weight_map": {"a": "/etc/passwd"}})"),
                 "expected a file beside the index"));
  CHECK(index_message(R"({"weight_map": {"a": "s-2.safetensors", "c": "s-3.safetensors"}})") ==
        "weight_map: tensor c: expected the shard s-3.safetensors beside the index, got no such "
        "file; download it again");
  CHECK(index_message(R"({"weight_map": {"a": "s-1.safetensors"}})") ==
        "weight_map: tensor a: expected in s-1.safetensors, got a shard without it");

  write_file(
      index,
      R"({"metadata": {"total_size": 12}, "weight_map": {"a": "s-2.safetensors", "b": "s-1.safetensors"}})");
  const Safetensors files = open();
  CHECK(files.shards().size() == 2);
  CHECK(files.tensors().size() == 2);
  CHECK(files.tensors()[0].name == "a");
  CHECK(read_floats(files.at("a")) == one);
  CHECK(read_floats(files.at("b")) == two);
  CHECK(read_floats(Safetensors::open(index).at("b")) == two);

  // Damage in a shard names the shard.
  const std::string whole = read_file(folder / "s-1.safetensors");
  write_file(folder / "s-1.safetensors", whole.substr(0, whole.size() - 1));
  CHECK(contains(failure(open),
                 "s-1.safetensors: tensor b: expected data up to byte 8, got a file with 7"));
}

TEST_CASE("random damage to headers never crashes the reader") {
  const std::vector<float> f32 = {1, 2, 3, 4, 5, 6};
  const std::vector<uint16_t> bf16 = {1, 2, 3, 4};
  TemporaryFolder folder;
  const TensorSource sources[] = {source("layer.a", TensorType::f32, {2, 3}, f32),
                                  source("layer.b", TensorType::bf16, {4}, bf16),
                                  source("layer.c", TensorType::f8_e4m3, {2, 4}, bf16)};
  const fs::path path = folder / "model.safetensors";
  write_safetensors(path, sources, {{"format", "pt"}});
  const std::string good = read_file(path);
  const size_t header = good.find("}}") + 2;
  const std::string digits = "0123456789";
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = good;
    for (int k = 0; k < 1 + i % 3; ++k) {
      char& c = bytes[random() % header];
      switch (i % 5) {
        case 0:
          c = static_cast<char>(c ^ (1 << random() % 8));
          break;
        case 1:
          c = static_cast<char>(random() % 256);
          break;
        case 2: {  // a digit for a digit: the header stays JSON
          const size_t at = bytes.find_first_of(digits, 8 + random() % (header - 8));
          if (at < header) bytes[at] = digits[random() % 10];
          break;
        }
        case 3:
          bytes.erase(8 + random() % (header - 8), 1);
          break;
        default:
          bytes.insert(8 + random() % (header - 8), 1, digits[random() % 10]);
          break;
      }
    }
    if (i % 7 == 0) bytes.resize(random() % bytes.size());
    write_file(path, bytes);
    try {
      const Safetensors file = Safetensors::open(path);
      // What was accepted can be read to its last byte.
      for (const TensorInfo& tensor : file.tensors()) {
        if (tensor.type != TensorType::other) (void)read_floats(tensor);
      }
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  CHECK(refused > 1200);
  CHECK(refused < 2000);
}

TEST_CASE("weights are views into the file, with their shapes checked") {
  std::vector<float> matrix(6);
  for (size_t i = 0; i < 6; ++i) matrix[i] = static_cast<float>(i) + 0.5f;
  const std::vector<uint16_t> halves = {0x3C00, 0x4000, 0x4200, 0x4400,
                                        0x4500, 0x4600, 0x4700, 0x4800};  // 1 .. 8
  const std::vector<uint16_t> brains = {0x3F80, 0x4000};
  const std::vector<int64_t> integers = {1, 2};
  const ModelFolder model(
      R"({"model_type": "x"})",
      {source("w", TensorType::f32, {2, 3}, matrix),
       source("stack", TensorType::f16, {2, 2, 2}, halves),
       source("v", TensorType::bf16, {2}, brains), source("i", TensorType::i64, {1, 2}, integers)});
  const auto checkpoint = model.open();
  const WeightView w = checkpoint->weight("w", {2, 3});
  CHECK(w.type == WeightType::fp32);
  CHECK(w.rows == 2);
  CHECK(w.cols == 3);
  CHECK(w.stride == 3);
  CHECK(floats_of(w) == matrix);
  CHECK(within(w, *checkpoint));
  const WeightView stack = checkpoint->weight("stack", {2, 2, 2});
  CHECK(stack.type == WeightType::fp16);
  CHECK(stack.rows == 4);
  CHECK(floats_of(stack) == std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
  CHECK(within(stack, *checkpoint));
  CHECK(checkpoint->values("v", {2}) == std::vector<float>{1, 2});
  CHECK(checkpoint->values("w", {2, 3}) == matrix);

  const std::vector<std::vector<int32_t>> parts = {{1, 0, 1}, {0}};
  const std::vector<WeightView> split = checkpoint->split_rows("w", {2, 3}, parts);
  CHECK(floats_of(split[0]) == std::vector<float>{3.5, 4.5, 5.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5});
  CHECK(floats_of(split[1]) == std::vector<float>{0.5, 1.5, 2.5});
  CHECK(!within(split[0], *checkpoint));
  CHECK(checkpoint->split_rows("w", {2, 3}, parts)[0].data == split[0].data);
  CHECK(floats_of(checkpoint->weight("w", {2, 3})) == matrix);

  CHECK(failure([&] {
          (void)checkpoint->weight("w", {3, 2});
        }) == model.file() + ": tensor w: expected shape [3, 2], got [2, 3]");
  CHECK(failure([&] {
          (void)checkpoint->weight("stack", {4, 2});
        }) == model.file() + ": tensor stack: expected shape [4, 2], got [2, 2, 2]");
  CHECK(failure([&] { (void)checkpoint->values("v", {3}); }) ==
        model.file() + ": tensor v: expected shape [3], got [2]");
  CHECK(failure([&] {
          (void)checkpoint->weight("none", {3, 2});
        }) == model.folder.path().string() + ": tensor none: expected shape [3, 2], got nothing");
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("i", {1, 2});
                 }),
                 "expected F32, BF16, F16, F8_E4M3 or U8 (NVFP4), got I64"));
  CHECK(contains(failure([&] {
                   (void)checkpoint->values("i", {1, 2});
                 }),
                 "expected F32, BF16 or F16, got I64"));
  CHECK(checkpoint->has("w"));
  CHECK(!checkpoint->has("W"));
  CHECK(checkpoint->first_of({"none", "v"}) == "v");
  CHECK(contains(failure([&] {
                   (void)checkpoint->first_of({"no", "none"});
                 }),
                 "expected a tensor no or none, got 4 tensors"));
  CHECK(contains(failure([&] { (void)Checkpoint::open(model.folder / "nowhere"); }),
                 "expected a model folder with config.json and model.safetensors, got nothing"));
  CHECK(contains(failure([&] { (void)Checkpoint::open(model.folder / "config.json"); }),
                 "got a file"));
}

TEST_CASE("the output matrix") {
  const std::vector<float> embedding = {1, 2, 3, 4}, head = {5, 6, 7, 8};
  const auto tensors = {source("embed", TensorType::f32, {2, 2}, embedding)};
  const auto with_head = {source("embed", TensorType::f32, {2, 2}, embedding),
                          source("lm_head.weight", TensorType::f32, {2, 2}, head)};
  const auto read = [](const ModelFolder& model) {
    return floats_of(model.open()->lm_head("embed", 2, 2));
  };
  CHECK(read(ModelFolder("{}", with_head)) == head);
  CHECK(read(ModelFolder(R"({"tie_word_embeddings": true})", with_head)) == head);
  CHECK(read(ModelFolder("{}", tensors)) == embedding);
  CHECK(read(ModelFolder(R"({"tie_word_embeddings": true})", tensors)) == embedding);
  CHECK(read(ModelFolder(
            R"({"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}})",
            tensors)) == embedding);
  const ModelFolder untied(R"({"tie_word_embeddings": false})", tensors);
  CHECK(failure([&] { (void)read(untied); }) ==
        untied.folder.path().string() +
            ": tensor lm_head.weight: expected shape [2, 2], got nothing; and tie_word_embeddings: "
            "false in config.json "
            "says that embed does not stand in for it");
}

TEST_CASE("FP8 weights: one scale, rows, blocks, experts") {
  // E4M3 codes of 1, 2, 3, -4, 0.5, 448, 2^-9 (smallest), -0.
  const std::vector<uint8_t> codes = {0x38, 0x40, 0x44, 0xC8, 0x30, 0x7E, 0x01, 0x80};
  const std::vector<float> one = {0.5f};
  const std::vector<float> rows = {2, 10};
  const std::vector<uint16_t> brain = {0x4000, 0x4120};  // 2, 10
  const std::vector<float> blocks = {1, 10, 100,
                                     1000};  // blocks of 1 x 3 on [2, 4]: columns 0-2 and 3
  const std::vector<float> experts = {3, 5};
  const ModelFolder model(
      R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 3], "activation_scheme": "dynamic"}})",
      {source("one", TensorType::f8_e4m3, {2, 4}, codes),
       source("one_scale", TensorType::f32, {}, one),
       source("row", TensorType::f8_e4m3, {2, 4}, codes),
       source("row_scale", TensorType::f32, {2, 1}, rows),
       source("rowb", TensorType::f8_e4m3, {2, 4}, codes),
       source("rowb_scale_inv", TensorType::bf16, {2}, brain),
       source("block", TensorType::f8_e4m3, {2, 4}, codes),
       source("block_scale_inv", TensorType::f32, {2, 2}, blocks),
       source("expert", TensorType::f8_e4m3, {2, 2, 2}, codes),
       source("expert_scale", TensorType::f32, {2}, experts),
       source("bare", TensorType::f8_e4m3, {2, 4}, codes),
       source("wrong", TensorType::f8_e4m3, {2, 4}, codes),
       source("wrong_scale", TensorType::f32, {4, 1}, blocks),
       source("kind", TensorType::f8_e4m3, {2, 4}, codes),
       source("kind_scale", TensorType::u8, {1}, codes)});
  const auto checkpoint = model.open();
  const float smallest = std::ldexp(1.0f, -9);
  CHECK(floats_of(checkpoint->weight("one", {2, 4})) ==
        std::vector<float>{0.5, 1, 1.5, -2, 0.25, 224, smallest / 2, -0.0f});
  CHECK(floats_of(checkpoint->weight("row", {2, 4})) ==
        std::vector<float>{2, 4, 6, -8, 5, 4480, smallest * 10, -0.0f});
  CHECK(floats_of(checkpoint->weight("rowb", {2, 4})) ==
        std::vector<float>{2, 4, 6, -8, 5, 4480, smallest * 10, -0.0f});
  CHECK(floats_of(checkpoint->weight("block", {2, 4})) ==
        std::vector<float>{1, 2, 3, -40, 50, 44800, smallest * 100, -0.0f});
  CHECK(floats_of(checkpoint->weight("expert", {2, 2, 2})) ==
        std::vector<float>{3, 6, 9, -12, 2.5, 2240, smallest * 5, -0.0f});
  CHECK(checkpoint->weight("one", {2, 4}).data == checkpoint->weight("one", {2, 4}).data);
  CHECK(floats_of(checkpoint->split_rows("row", {2, 4}, {{1}})[0]) ==
        std::vector<float>{5, 4480, smallest * 10, -0.0f});
  CHECK(checkpoint->weight("one", {2, 4}).type == WeightType::fp32);
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("bare", {2, 4});
                 }),
                 "tensor bare_scale_inv: expected a scale of the F8_E4M3 tensor bare (or "
                 "bare_scale), got nothing"));
  CHECK(failure([&] {
          (void)checkpoint->weight("wrong", {2, 4});
        }) == model.file() +
                  ": tensor wrong_scale: expected one scale, one a row (2) or blocks of 1 x 3 ([2, "
                  "2]) for [2, 4], "
                  "got [4, 1]");
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("kind", {2, 4});
                 }),
                 "tensor kind_scale: expected F32, BF16 or F16, got U8"));
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("one", {4, 2});
                 }),
                 "expected shape [4, 2], got [2, 4]"));

  // 448 * 0.3 (FP32 0.300000012) = 134.400005: between the BF16 neighbours 134 and 135, nearer to
  // 134. 3 * 0.3 = 0.90000004: between 0.8984375 (0x3F66) and 0.90234375 (0x3F67), nearer to
  // 0.8984375.
  const std::vector<float> third = {0.3f};
  const ModelFolder rounded("{}", {source("one", TensorType::f8_e4m3, {2, 4}, codes),
                                   source("one_scale", TensorType::f32, {1}, third)});
  const auto low = rounded.open(WeightType::bf16);
  const WeightView view = low->weight("one", {2, 4});
  CHECK(view.type == WeightType::bf16);
  CHECK(floats_of(view)[5] == 134.0f);
  CHECK(floats_of(view)[2] == 0.8984375f);
}

TEST_CASE("FP8 blocks of 128 x 128 with ragged edges") {
  const int64_t rows = 130, cols = 257;
  const std::vector<uint8_t> codes(static_cast<size_t>(rows * cols), 0x38);  // 1
  const std::vector<float> scales = {1, 2, 3, 4, 5, 6};                      // [2, 3]
  const ModelFolder model("{}", {source("w", TensorType::f8_e4m3, {rows, cols}, codes),
                                 source("w_scale_inv", TensorType::f32, {2, 3}, scales)});
  const std::vector<float> w = floats_of(model.open()->weight("w", {rows, cols}));
  int64_t wrong = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const float expected = static_cast<float>((r < 128 ? 0 : 3) + (c < 128   ? 1
                                                                     : c < 256 ? 2
                                                                               : 3));
      wrong += w[static_cast<size_t>(r * cols + c)] != expected;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("NVFP4 weights in ModelOpt's layout") {
  // Codes 0 .. 15 in order, element 2i in the low nibble: byte i = (2i + 1) << 4 | 2i. Row 1
  // repeats code 7 (6.0).
  std::vector<uint8_t> packed;
  for (int i = 0; i < 8; ++i) packed.push_back(static_cast<uint8_t>((2 * i + 1) << 4 | 2 * i));
  for (int i = 0; i < 8; ++i) packed.push_back(0x77);
  const std::vector<uint8_t> scales = {0x40, 0x7E};  // 2, 448
  const std::vector<float> global = {0.25f};
  const std::vector<float> globals = {0.25f, 2.0f};
  const std::vector<uint8_t> wrong = {1, 2, 3};
  const ModelFolder model("{}", {source("w", TensorType::u8, {2, 8}, packed),
                                 source("w_scale", TensorType::f8_e4m3, {2, 1}, scales),
                                 source("w_scale_2", TensorType::f32, {}, global),
                                 source("e", TensorType::u8, {2, 1, 8}, packed),
                                 source("e_scale", TensorType::f8_e4m3, {2, 1, 1}, scales),
                                 source("e_scale_2", TensorType::f32, {2}, globals),
                                 source("no2", TensorType::u8, {2, 8}, packed),
                                 source("no2_scale", TensorType::f8_e4m3, {2, 1}, scales),
                                 source("bad", TensorType::u8, {2, 8}, packed),
                                 source("bad_scale", TensorType::f8_e4m3, {1, 2}, scales),
                                 source("kind", TensorType::u8, {2, 8}, packed),
                                 source("kind_scale", TensorType::u8, {2, 1}, scales),
                                 source("alone", TensorType::u8, {2, 8}, packed),
                                 source("x", TensorType::u8, {1, 3}, wrong)});
  const auto checkpoint = model.open();
  // Row 0: factor 2 * 0.25 = 0.5; row 1: 448 * 0.25 = 112, times 6 = 672.
  std::vector<float> expected = {0,  0.25,  0.5,  0.75,  1,  1.5,  2,  3,
                                 -0, -0.25, -0.5, -0.75, -1, -1.5, -2, -3};
  expected.insert(expected.end(), 16, 672.0f);
  const WeightView w = checkpoint->weight("w", {2, 16});
  CHECK(w.rows == 2);
  CHECK(w.cols == 16);
  CHECK(floats_of(w) == expected);
  CHECK(std::signbit(floats_of(w)[8]));
  for (size_t i = 16; i < 32; ++i) expected[i] = 6.0f * 448 * 2;
  CHECK(floats_of(checkpoint->weight("e", {2, 1, 16})) == expected);
  CHECK(failure([&] {
          (void)checkpoint->weight("w", {2, 32});
        }) ==
        model.file() +
            ": tensor w: expected shape [2, 16] (two NVFP4 codes a byte of [2, 32]), got [2, 8]");
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("x", {1, 6});
                 }),
                 "expected a multiple of 16 columns for NVFP4"));
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("no2", {2, 16});
                 }),
                 "tensor no2_scale_2: expected the FP32 scale of no2, got nothing"));
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("bad", {2, 16});
                 }),
                 "tensor bad_scale: expected shape [2, 1], got [1, 2]"));
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("kind", {2, 16});
                 }),
                 "tensor kind_scale: expected F8_E4M3, got U8"));
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("alone", {2, 16});
                 }),
                 "tensor alone_scale: expected shape [2, 1], got nothing"));
}

TEST_CASE("headers alone: shapes without data") {
  const std::vector<float> matrix(6, 1.0f);
  const std::vector<uint8_t> codes(16, 0x38);
  const ModelFolder model("{}", {source("w", TensorType::f32, {2, 3}, matrix),
                                 source("q", TensorType::u8, {2, 8}, codes),
                                 source("n_packed", TensorType::u8, {2, 8}, codes)});
  const auto checkpoint =
      Checkpoint::open(model.folder.path(), WeightType::bf16, WeightAccess::headers);
  const WeightView w = checkpoint->weight("w", {2, 3});
  CHECK(w.data == nullptr);
  CHECK(w.type == WeightType::fp32);
  CHECK(w.rows == 2);
  CHECK(w.cols == 3);
  const WeightView q = checkpoint->weight("q", {2, 16});  // scales are not even looked for
  CHECK(q.data == nullptr);
  CHECK(q.type == WeightType::bf16);
  CHECK(checkpoint->split_rows("w", {2, 3}, {{1, 0, 1}})[0].rows == 3);
  CHECK(checkpoint->values("w", {2, 3}) == std::vector<float>(6));
  CHECK(contains(failure([&] {
                   (void)checkpoint->weight("w", {3, 2});
                 }),
                 "expected shape [3, 2], got [2, 3]"));
  CHECK(failure([&] {
          (void)checkpoint->weight("n", {2, 16});
        }) == model.file() + ": tensor n_packed: expected n, got a packed layout that is not read");
}

TEST_CASE("declared quantization goes into the notes") {
  const std::vector<float> one = {1};
  const auto tensors = {source("a", TensorType::f32, {1}, one)};
  const auto notes = [&](std::string_view config, WeightType type = WeightType::fp32) {
    return ModelFolder(config, tensors).open(type)->notes();
  };
  CHECK(notes("{}").empty());
  CHECK(notes(R"({"quantization_config": null})").empty());
  CHECK(notes(R"({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}})",
              WeightType::bf16) ==
        std::vector<std::string>{"weights quantized (fp8) were dequantized at load to BF16",
                                 "the checkpoint declares quantized activations (FP8 E4M3, "
                                 "static); the run did not quantize them"});
  CHECK(contains(
      notes(R"({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})")[1],
      "(NVFP4)"));
  CHECK(contains(
      notes(
          R"({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups":
            {"group_0": {"input_activations": {"num_bits": 4, "type": "float", "dynamic": false, "group_size": 16},
                         "weights": {"num_bits": 4, "type": "float"}},
             "group_1": {"input_activations": null}}}})")[1],
      "(4-bit float, static)"));
  const auto weight_only = notes(R"({"quantization_config": {"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": null}}}})");
  CHECK(weight_only ==
        std::vector<std::string>{
            "weights quantized (compressed-tensors) were dequantized at load to FP32"});
  CHECK(contains(refusal([&] {
                   (void)notes(R"({"quantization_config": {"quant_method": "gptq", "bits": 4}})");
                 }),
                 "config.json: quantization_config.quant_method: expected fp8, modelopt or "
                 "compressed-tensors, got \"gptq\""));

  const ModelFolder beside("{}", tensors);
  write_file(
      beside.folder / "hf_quant_config.json",
      R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})");
  CHECK(beside.open()->quantization()->method == "modelopt FP8");
  CHECK(contains(beside.open()->notes()[1], "(FP8 E4M3, static)"));
}

TEST_CASE("the hash identifies a model") {
  std::vector<float> w = {1, 2, 3};
  const auto hash = [&](std::string_view config) {
    return ModelFolder(config, {source("w", TensorType::f32, {3}, w)}).open()->hash();
  };
  const std::string first = hash("{}");
  CHECK(first.size() == 64);
  CHECK(hash("{}") == first);  // another folder, the same content
  CHECK(hash("{} ") != first);
  w[1] = std::nextafter(2.0f, 3.0f);
  CHECK(hash("{}") != first);

  // A large file is sampled: both ends of every tensor count, wherever they lie. (A sparse file: 80
  // MiB of zeros.)
  TemporaryFolder folder;
  write_file(folder / "config.json", "{}");
  const int64_t half = int64_t{40} << 20;
  const std::string header =
      R"({"a": {"dtype": "U8", "shape": [)" + std::to_string(half) + R"(], "data_offsets": [0, )" +
      std::to_string(half) + R"(]}, "b": {"dtype": "U8", "shape": [)" + std::to_string(half) +
      R"(], "data_offsets": [)" + std::to_string(half) + ", " + std::to_string(2 * half) + "]}}";
  const fs::path path = folder / "model.safetensors";
  write_file(path, raw_safetensors(header, ""));
  const auto start = static_cast<int64_t>(8 + header.size());
  fs::resize_file(path, static_cast<uintmax_t>(start + 2 * half));
  const auto with_byte = [&](int64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(start + at);
    file.put('x');
    file.close();
    const std::string text = Checkpoint::open(folder.path())->hash();
    std::fstream back(path, std::ios::in | std::ios::out | std::ios::binary);
    back.seekp(start + at);
    back.put('\0');
    return text;
  };
  const std::string zeros = Checkpoint::open(folder.path())->hash();
  CHECK(Checkpoint::open(folder.path())->hash() == zeros);
  for (const int64_t at :
       {int64_t{0}, int64_t{100000}, half - 1, half, half + 4095, 2 * half - 1}) {
    CHECK_MESSAGE(with_byte(at) != zeros, "byte ", at);
  }
  CHECK(Checkpoint::open(folder.path())->hash() == zeros);
}

TEST_CASE("models in the hub cache") {
  TemporaryFolder cache;
  const auto find = [&](std::string_view name) { return find_model(name, cache.path()); };
  const fs::path repository = cache / "models--org--name";

  const std::string absent = refusal([&] { (void)find("org/name"); });
  CHECK(absent == "org/name: expected a model folder, or a hub name in the cache (" +
                      repository.string() +
                      "), got neither; download it with: hf download org/name --cache-dir " +
                      cache.path().string());

  write_file(repository / "blobs" / "1", "{}");
  fs::create_directories(repository / "snapshots" / "abc");
  fs::create_symlink("../../blobs/1", repository / "snapshots" / "abc" / "config.json");
  CHECK(find("org/name") == repository / "snapshots" / "abc");  // the only one
  CHECK(find("org/name@abc") == repository / "snapshots" / "abc");

  write_file(repository / "snapshots" / "def" / "config.json", "{}");
  CHECK(contains(refusal([&] { (void)find("org/name"); }), "expected the revision main in "));
  write_file(repository / "refs" / "main", "def\n");
  CHECK(find("org/name") == repository / "snapshots" / "def");
  write_file(repository / "refs" / "v1", "abc");
  CHECK(find("org/name@v1") == repository / "snapshots" / "abc");
  CHECK(contains(refusal([&] { (void)find("org/name@v2"); }),
                 "hf download org/name --revision v2 --cache-dir "));

  fs::remove(repository / "blobs" / "1");
  CHECK(contains(refusal([&] { (void)find("org/name@v1"); }),
                 "config.json, got nothing (an unfinished download)"));
  write_file(repository / "refs" / "main", "missing");
  CHECK(contains(refusal([&] { (void)find("org/name"); }), "missing/config.json, got nothing"));

  write_file(cache / "models--gpt" / "refs" / "main", "r");
  write_file(cache / "models--gpt" / "snapshots" / "r" / "config.json", "{}");
  CHECK(find("gpt") == cache / "models--gpt" / "snapshots" / "r");

  // A folder is itself; what can be neither folder nor hub name is told so.
  CHECK(find((cache / "models--gpt" / "snapshots" / "r").string()) ==
        cache / "models--gpt" / "snapshots" / "r");
  CHECK(contains(refusal([&] { (void)find(cache.path().string()); }),
                 "expected a folder with config.json and model.safetensors, got one without"));
  CHECK(contains(refusal([&] { (void)find("/no/such/folder"); }),
                 "/no/such/folder: expected a model folder or a hub name (ORG/NAME), got no "
                 "such folder"));
  for (const char* name :
       {"", "a/b/c", "../x-that-nobody-has", "org/../name", "org/name@../x", "org/name@", "a b"}) {
    CHECK(contains(refusal([&] { (void)find(name); }), "expected a model folder or a hub name"));
  }
  CHECK(contains(refusal([&] { (void)find((repository / "refs" / "main").string()); }),
                 "got a file"));
  CHECK(contains(refusal([&] { (void)find_model("org/name-that-nobody-has"); }),
                 "; download it with: hf download org/name-that-nobody-has"));
  CHECK(default_hub().filename() == "hub");
}

TEST_CASE("stored checkpoints of the library") {
  const std::string folder = case_path("models-ref");
  if (folder.empty()) return;
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_directory()) continue;
    const auto checkpoint = Checkpoint::open(entry.path());
    CHECK_MESSAGE(checkpoint->tensors().tensors().size() > 20, entry.path().string());
    CHECK(checkpoint->hash().size() == 64);
    const std::string embedding =
        checkpoint->first_of({"backbone.embeddings.weight", "model.embed_tokens.weight",
                              "model.language_model.embed_tokens.weight"});
    CHECK(checkpoint->lm_head(embedding, 256, 64).rows == 256);
    const Safetensors reference = Safetensors::open(entry.path() / "reference.safetensors");
    CHECK(read_integers(reference.at("input_ids")).size() == 300);
    CHECK(reference.at("logits").shape == std::vector<int64_t>{2, 150, 256});
    ++files;
  }
  CHECK(files >= 12);
  const auto sharded = Checkpoint::open(folder + "/qwen3_next-small");
  CHECK(sharded->tensors().shards().size() == 3);
}
