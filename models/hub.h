// Finds a model given as a folder or as a hub name in the local hub cache
// (models--ORG--NAME/snapshots/REVISION, refs/main naming the revision; files are links into
// blobs/).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace replayeval {

/// ~/.cache/huggingface/hub. Empty when there is no home folder.
std::filesystem::path default_hub();

/// The folder of a model: `model` itself when it is a folder ("~/" is expanded); otherwise the
/// snapshot of the hub name "ORG/NAME", "NAME" or "ORG/NAME@REVISION" (a branch, tag or commit;
/// default main) below `hub` (empty: default_hub()). Without refs/main a single snapshot is taken.
/// Throws std::invalid_argument saying where it was looked for, with the download command.
std::filesystem::path find_model(std::string_view model, const std::filesystem::path& hub = {});

}  // namespace replayeval
