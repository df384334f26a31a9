// What most sources for load_inline use of <torch/extension.h>: tensors, autograd functions, pybind11.  It takes the place of
// torch's header where a build may be fast; sources that name torch::nn, optim, data, jit or serialisation get torch's own.
#pragma once
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/enum.h>
#include <torch/fft.h>
#include <torch/special.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
