#pragma once

#include <pybind11/pybind11.h>

void bind_ensemble(pybind11::module_& m);
