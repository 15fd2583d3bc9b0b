// In place of csrc/templates/dequant/float.cuh: no floats.
#pragma once
#include "templates/dequant/int.cuh"
