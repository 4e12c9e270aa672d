// PG-19 (Rae et al. 2019, github.com/deepmind/pg19) in its on-disk layout, or as the hub's Parquet.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "datasets/token_stream.h"

namespace replayeval {

/// Books of a split: those that metadata.csv lists and that exist as <folder>/<split>/<id>.txt, in
/// the order of metadata.csv; or, when there is no metadata.csv, the rows of <split>-*.parquet,
/// data/<split>-*.parquet or <split>/*.parquet (or of `folder` itself, a .parquet file) in their
/// order, with columns text, short_book_title and url, whose last part is the id (else the row's
/// number). Throws std::runtime_error saying what is looked for and where PG-19 is published when
/// there are none.
std::vector<DocumentEntry> list_pg19(const std::filesystem::path& folder, const std::string& split);

}  // namespace replayeval
