// Parquet through Arrow; no other file of this folder includes its headers.
#include <arrow/api.h>
#include <arrow/io/interfaces.h>
#include <parquet/arrow/writer.h>
#include <parquet/exception.h>
#include <parquet/properties.h>

#include <stdexcept>

#include "reports/export.h"
#include "reports/export_rows.h"
#include "reports/schema.h"

namespace replayeval {
namespace {

namespace fs = std::filesystem;

// Rows of a row group: about what a reader takes into memory at a time.
constexpr int64_t kGroupRows = int64_t{1} << 20;
constexpr int64_t kGroupAnswers = 4096;

/// A LargeFile as Arrow writes to it. Why writing failed is kept, for the message: no exception may
/// pass through Arrow.
class Sink : public arrow::io::OutputStream {
 public:
  explicit Sink(const fs::path& path) : file_(path) {}
  arrow::Status Write(const void* data, int64_t bytes) override {
    try {
      file_.write({static_cast<const char*>(data), static_cast<size_t>(bytes)});
    } catch (const std::runtime_error& error) {
      failure_ = error.what();
      return arrow::Status::IOError(failure_);
    }
    return arrow::Status::OK();
  }
  /// Throws why writing failed, `otherwise` when it did not.
  [[noreturn]] void fail(const std::string& otherwise) const {
    throw std::runtime_error(failure_.empty() ? otherwise : failure_);
  }
  arrow::Status Close() override {
    closed_ = true;
    return arrow::Status::OK();
  }
  bool closed() const override { return closed_; }
  arrow::Result<int64_t> Tell() const override { return file_.written(); }
  void finish() { file_.finish(); }

 private:
  LargeFile file_;
  std::string failure_;
  bool closed_ = false;
};

/// A Parquet file that is written column by column, a row group at a time.
class Table {
 public:
  Table(const fs::path& path, std::shared_ptr<Sink> sink,
        const std::vector<std::shared_ptr<arrow::Field>>& fields)
      : path_(path), sink_(std::move(sink)) {
    schema_ = arrow::schema(fields, arrow::key_value_metadata({"schema"}, {kSchema}));
    const auto properties =
        parquet::WriterProperties::Builder().compression(parquet::Compression::ZSTD)->build();
    const auto with_schema = parquet::ArrowWriterProperties::Builder().store_schema()->build();
    auto writer = parquet::arrow::FileWriter::Open(*schema_, arrow::default_memory_pool(), sink_,
                                                   properties, with_schema);
    check(writer.status());
    writer_ = std::move(*writer);
    for (const auto& field : fields) {
      std::unique_ptr<arrow::ArrayBuilder> builder;
      check(arrow::MakeBuilder(arrow::default_memory_pool(), field->type(), &builder));
      builders_.push_back(std::move(builder));
    }
  }

  void check(const arrow::Status& status) const {
    if (!status.ok()) sink_->fail(path_.string() + ": cannot be written: " + status.ToString());
  }
  template <class Builder>
  Builder& column(size_t index) {
    return static_cast<Builder&>(*builders_[index]);
  }
  void end_row(int64_t group_rows) {
    ++rows_;
    if (++open_ == group_rows) flush();
  }
  int64_t finish() {
    if (open_ > 0 || rows_ == 0) flush();
    check(writer_->Close());
    sink_->finish();
    return rows_;
  }

 private:
  void flush() {
    std::vector<std::shared_ptr<arrow::Array>> arrays;
    for (const auto& builder : builders_) {
      std::shared_ptr<arrow::Array> array;
      check(builder->Finish(&array));
      arrays.push_back(std::move(array));
    }
    check(writer_->WriteTable(*arrow::Table::Make(schema_, arrays, open_),
                              std::max<int64_t>(1, open_)));
    open_ = 0;
  }

  fs::path path_;
  std::shared_ptr<Sink> sink_;
  std::shared_ptr<arrow::Schema> schema_;
  std::unique_ptr<parquet::arrow::FileWriter> writer_;
  std::vector<std::unique_ptr<arrow::ArrayBuilder>> builders_;
  int64_t rows_ = 0, open_ = 0;
};

/// Fills one row after another in the order of the columns.
class Row {
 public:
  explicit Row(Table* table) : table_(table) {}
  Row& text(const std::string& value) {
    table_->check(table_->column<arrow::StringBuilder>(next_++).Append(value));
    return *this;
  }
  template <class Builder, class T>
  Row& value(T value) {
    table_->check(table_->column<Builder>(next_++).Append(value));
    return *this;
  }
  template <class Builder, class T>
  Row& optional(const std::optional<T>& value) {
    Builder& builder = table_->column<Builder>(next_++);
    table_->check(value ? builder.Append(*value) : builder.AppendNull());
    return *this;
  }
  /// A list, null where there is no element.
  template <class Builder, class T>
  Row& list(const std::vector<T>& values) {
    auto& lists = table_->column<arrow::ListBuilder>(next_++);
    if (values.empty()) {
      table_->check(lists.AppendNull());
      return *this;
    }
    table_->check(lists.Append());
    table_->check(static_cast<Builder*>(lists.value_builder())
                      ->AppendValues(values.data(), static_cast<int64_t>(values.size())));
    return *this;
  }

 private:
  Table* table_;
  size_t next_ = 0;
};

std::shared_ptr<arrow::Field> column(const std::string& name,
                                     const std::shared_ptr<arrow::DataType>& type,
                                     bool nullable = false) {
  return arrow::field(name, type, nullable);
}

std::optional<std::string> known(const std::string& text) {
  return text.empty() ? std::nullopt : std::optional(text);
}

/// Calls `write(sink)`, with Parquet's exceptions as ours.
template <class Write>
int64_t into_file(const fs::path& path, Write write) {
  const auto sink = std::make_shared<Sink>(path);
  try {
    return write(sink);
  } catch (const parquet::ParquetException& error) {
    sink->fail(path.string() + ": cannot be written: " + error.what());
  }
}

}  // namespace

int64_t write_positions_parquet(const Report& report, const fs::path& path) {
  return into_file(path, [&](const std::shared_ptr<Sink>& sink) {
    Table table(path, sink,
                {column("document", arrow::utf8()), column("position", arrow::int64()),
                 column("token", arrow::int32()), column("state", arrow::utf8()),
                 column("kl", arrow::float32()), column("nll", arrow::float32(), true),
                 column("top1", arrow::uint8(), true)});
    visit_positions(report, [&](const PositionRow& row) {
      Row(&table)
          .text(report.documents[row.document].id)
          .value<arrow::Int64Builder>(row.position)
          .value<arrow::Int32Builder>(row.token)
          .text(report.states[row.state].info.name)
          .value<arrow::FloatBuilder>(row.kl)
          .optional<arrow::FloatBuilder>(row.nll)
          .optional<arrow::UInt8Builder>(row.top1);
      table.end_row(kGroupRows);
    });
    return table.finish();
  });
}

int64_t write_answers_parquet(const Report& report, const fs::path& path) {
  return into_file(path, [&](const std::shared_ptr<Sink>& sink) {
    Table table(path, sink,
                {column("task", arrow::utf8()), column("item", arrow::utf8()),
                 column("category", arrow::utf8()), column("level", arrow::int32()),
                 column("repeat", arrow::int32()), column("state", arrow::utf8()),
                 column("gold", arrow::utf8()), column("extracted", arrow::utf8(), true),
                 column("correct", arrow::boolean()), column("finish_reason", arrow::utf8(), true),
                 column("tokens", arrow::int64(), true), column("rule", arrow::utf8(), true),
                 column("stage", arrow::int32()), column("seconds", arrow::float64()),
                 column("prompt_sha256", arrow::utf8()), column("text", arrow::utf8()),
                 column("token_ids", arrow::list(arrow::int32()), true),
                 column("margins", arrow::list(arrow::float32()), true)});
    for (const StateReport& state : report.states) {
      for (const Answer& answer : state.answers) {
        const ItemInfo& item = report.items.at(static_cast<size_t>(answer.item));
        Row(&table)
            .text(item.task)
            .text(item.id)
            .text(item.category)
            .value<arrow::Int32Builder>(item.level)
            .value<arrow::Int32Builder>(answer.repeat)
            .text(state.info.name)
            .text(item.gold)
            .optional<arrow::StringBuilder>(known(answer.extracted))
            .value<arrow::BooleanBuilder>(answer.correct)
            .optional<arrow::StringBuilder>(known(answer.finish_reason))
            .optional<arrow::Int64Builder>(answer.tokens < 0 ? std::nullopt
                                                             : std::optional(answer.tokens))
            .optional<arrow::StringBuilder>(known(answer.rule))
            .value<arrow::Int32Builder>(answer.stage)
            .value<arrow::DoubleBuilder>(answer.seconds)
            .text(item.prompt_sha256)
            .text(answer.text)
            .list<arrow::Int32Builder>(answer.token_ids)
            .list<arrow::FloatBuilder>(answer.margins);
        table.end_row(kGroupAnswers);
      }
    }
    return table.finish();
  });
}

}  // namespace replayeval
