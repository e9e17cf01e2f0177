#pragma once

#include <pybind11/pybind11.h>

void bind_virtual_engine(pybind11::module_& m);
