// What the CUDA functions of this folder are without CUDA.
#include "quant/cuda_support.h"
