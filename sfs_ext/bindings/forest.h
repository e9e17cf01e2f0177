#pragma once

#include <pybind11/pybind11.h>

void bind_forest(pybind11::module_& m);
