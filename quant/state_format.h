#pragma once
namespace replayeval {
struct StateFormat;
}
