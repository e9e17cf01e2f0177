#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "sfs/request.h"

// What callers of either engine ask for; its prompt comes beside it.
sfs::Request requested(std::uint64_t request_id, double arrival_s, int output_tokens,
                       int max_tokens, double predicted_output_tokens, int priority);

void bind_virtual_engine(pybind11::module_& m);
