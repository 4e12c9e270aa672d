#include "datasets/parquet.h"

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <parquet/arrow/reader.h>
#include <parquet/exception.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

namespace replayeval {

struct ParquetFile::State {
  std::filesystem::path path;
  std::unique_ptr<parquet::arrow::FileReader> reader;
  std::shared_ptr<arrow::Schema> schema;
  std::vector<std::string> columns;
  std::vector<int64_t> group_rows;  // rows before each row group, then of all

  // The column and row group that was read last: texts of books are asked for one by one.
  std::mutex mutex;
  std::string last_column;
  size_t last_group = 0;
  std::shared_ptr<arrow::ChunkedArray> last;
};

namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what) {
  throw std::runtime_error(path.string() + ": " + what);
}

// Texts of both offset widths, and of the view layouts.
bool is_text(arrow::Type::type type) {
  return type == arrow::Type::STRING || type == arrow::Type::LARGE_STRING ||
         type == arrow::Type::BINARY || type == arrow::Type::LARGE_BINARY ||
         type == arrow::Type::STRING_VIEW || type == arrow::Type::BINARY_VIEW;
}

std::string_view text_at(const arrow::Array& array, int64_t i) {
  switch (array.type_id()) {
    case arrow::Type::LARGE_STRING:
    case arrow::Type::LARGE_BINARY:
      return static_cast<const arrow::LargeBinaryArray&>(array).GetView(i);
    case arrow::Type::STRING_VIEW:
    case arrow::Type::BINARY_VIEW:
      return static_cast<const arrow::BinaryViewArray&>(array).GetView(i);
    default:
      return static_cast<const arrow::BinaryArray&>(array).GetView(i);
  }
}

template <class Array>
int64_t integer_at(const arrow::Array& array, int64_t i) {
  return static_cast<int64_t>(static_cast<const Array&>(array).Value(i));
}

// Null function: not an integer type.
using IntegerAt = int64_t (*)(const arrow::Array&, int64_t);
IntegerAt integer_reader(arrow::Type::type type) {
  switch (type) {
    case arrow::Type::BOOL:
      return integer_at<arrow::BooleanArray>;
    case arrow::Type::INT8:
      return integer_at<arrow::Int8Array>;
    case arrow::Type::INT16:
      return integer_at<arrow::Int16Array>;
    case arrow::Type::INT32:
      return integer_at<arrow::Int32Array>;
    case arrow::Type::INT64:
      return integer_at<arrow::Int64Array>;
    case arrow::Type::UINT8:
      return integer_at<arrow::UInt8Array>;
    case arrow::Type::UINT16:
      return integer_at<arrow::UInt16Array>;
    case arrow::Type::UINT32:
      return integer_at<arrow::UInt32Array>;
    case arrow::Type::UINT64:
      return integer_at<arrow::UInt64Array>;
    default:
      return nullptr;
  }
}

bool is_readable(const arrow::DataType& type, bool inside_list) {
  if (is_text(type.id()) || integer_reader(type.id()) != nullptr ||
      type.id() == arrow::Type::FLOAT || type.id() == arrow::Type::DOUBLE)
    return true;
  if (type.id() == arrow::Type::DICTIONARY)
    return is_readable(*static_cast<const arrow::DictionaryType&>(type).value_type(), inside_list);
  if (!inside_list && (type.id() == arrow::Type::LIST || type.id() == arrow::Type::LARGE_LIST))
    return is_readable(*type.field(0)->type(), true);
  return false;
}

template <class ListArray>
std::pair<int64_t, int64_t> list_range(const arrow::Array& array, int64_t i) {
  const auto& list = static_cast<const ListArray&>(array);
  return {list.value_offset(i), list.value_offset(i) + list.value_length(i)};
}

ParquetCell cell_at(const arrow::Array& array, int64_t i) {
  if (array.IsNull(i)) return {};
  if (is_text(array.type_id())) return std::string(text_at(array, i));
  if (const IntegerAt integer = integer_reader(array.type_id())) return integer(array, i);
  switch (array.type_id()) {
    case arrow::Type::FLOAT:
      return double{static_cast<const arrow::FloatArray&>(array).Value(i)};
    case arrow::Type::DOUBLE:
      return static_cast<const arrow::DoubleArray&>(array).Value(i);
    case arrow::Type::DICTIONARY: {
      const auto& coded = static_cast<const arrow::DictionaryArray&>(array);
      return cell_at(*coded.dictionary(), coded.GetValueIndex(i));
    }
    default: {
      const bool large = array.type_id() == arrow::Type::LARGE_LIST;
      const auto [begin, end] = large ? list_range<arrow::LargeListArray>(array, i)
                                      : list_range<arrow::ListArray>(array, i);
      const arrow::Array& values = large
                                       ? *static_cast<const arrow::LargeListArray&>(array).values()
                                       : *static_cast<const arrow::ListArray&>(array).values();
      std::vector<std::string> texts;
      for (int64_t k = begin; k < end; ++k) texts.push_back(text_of(cell_at(values, k)));
      return texts;
    }
  }
}

}  // namespace

ParquetFile::ParquetFile(const std::filesystem::path& path) : state_(std::make_shared<State>()) {
  state_->path = path;
  try {
    auto file = arrow::io::ReadableFile::Open(path.string());
    if (!file.ok()) fail(path, "cannot be read: " + file.status().message());
    auto reader = parquet::arrow::OpenFile(*file, arrow::default_memory_pool());
    if (!reader.ok()) fail(path, "not Parquet: " + reader.status().message());
    state_->reader = std::move(*reader);
    if (const auto status = state_->reader->GetSchema(&state_->schema); !status.ok())
      fail(path, "not Parquet: " + status.message());
    state_->columns = state_->schema->field_names();
    state_->group_rows.push_back(0);
    for (int group = 0; group < state_->reader->num_row_groups(); ++group) {
      state_->group_rows.push_back(
          state_->group_rows.back() +
          state_->reader->parquet_reader()->metadata()->RowGroup(group)->num_rows());
    }
  } catch (const parquet::ParquetException& error) {
    fail(path, std::string("not Parquet: ") + error.what());
  }
}

int64_t ParquetFile::rows() const { return state_->group_rows.back(); }

const std::vector<std::string>& ParquetFile::columns() const { return state_->columns; }

bool ParquetFile::has(const std::string& column) const {
  return std::find(state_->columns.begin(), state_->columns.end(), column) != state_->columns.end();
}

bool ParquetFile::readable(const std::string& column) const {
  const auto field = state_->schema->GetFieldByName(column);
  return field != nullptr && is_readable(*field->type(), false);
}

std::vector<ParquetCell> ParquetFile::read(const std::string& column, int64_t first,
                                           int64_t count) const {
  State& s = *state_;
  if (!has(column)) {
    std::string there;
    for (const std::string& name : s.columns) there += " " + name;
    fail(s.path, "no column '" + column + "'; there are:" + there);
  }
  if (!readable(column)) {
    fail(s.path, "column '" + column + "' is of type " +
                     s.schema->GetFieldByName(column)->type()->ToString() +
                     "; expected texts, numbers or lists of them");
  }
  if (count < 0) count = rows() - first;
  if (first < 0 || first + count > rows())
    throw std::logic_error("ParquetFile::read: rows beyond the end");
  const std::lock_guard lock(s.mutex);
  std::vector<ParquetCell> cells;
  cells.reserve(static_cast<size_t>(count));
  try {
    // Parquet numbers leaves: a column's are those whose path begins with its name.
    std::vector<int> leaves;
    const auto* schema = s.reader->parquet_reader()->metadata()->schema();
    for (int leaf = 0; leaf < schema->num_columns(); ++leaf) {
      if (schema->Column(leaf)->path()->ToDotVector().front() == column) leaves.push_back(leaf);
    }
    for (size_t group = 0; group + 1 < s.group_rows.size(); ++group) {
      const int64_t begin = std::max(first, s.group_rows[group]);
      const int64_t end = std::min(first + count, s.group_rows[group + 1]);
      if (begin >= end) continue;
      if (s.last == nullptr || s.last_column != column || s.last_group != group) {
        s.last = nullptr;
        const auto table = s.reader->ReadRowGroup(static_cast<int>(group), leaves);
        if (!table.ok()) fail(s.path, "column '" + column + "': " + table.status().message());
        s.last = (*table)->column(0);
        s.last_column = column;
        s.last_group = group;
      }
      int64_t row = s.group_rows[group];
      for (const auto& chunk : s.last->chunks()) {
        for (int64_t i = std::max<int64_t>(begin - row, 0);
             i < std::min(chunk->length(), end - row); ++i)
          cells.push_back(cell_at(*chunk, i));
        row += chunk->length();
      }
    }
  } catch (const parquet::ParquetException& error) {
    fail(s.path, "column '" + column + "': " + error.what());
  }
  if (static_cast<int64_t>(cells.size()) != count)
    fail(s.path, "column '" + column + "' has fewer rows than the file says");
  return cells;
}

std::string text_of(const ParquetCell& cell) {
  if (const auto* text = std::get_if<std::string>(&cell)) return *text;
  if (const auto* integer = std::get_if<int64_t>(&cell)) return std::to_string(*integer);
  if (const auto* real = std::get_if<double>(&cell)) return std::to_string(*real);
  if (std::holds_alternative<std::monostate>(cell)) return "";
  throw std::runtime_error("a list stands where a text is expected");
}

}  // namespace replayeval
