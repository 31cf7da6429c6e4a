"""Kernels that make the ops of tileops run on a CPU. Installing this distribution is the whole of its use."""

from tileops.backend import RegisterKernelBuilder, RegisterKernelType, hookimpl, note

from tileops_backend_example.target import build_rms_norm
from tileops_backend_example.tilelang_row import TileLangRowLayerNorm, toolchain_missing
from tileops_backend_example.torch_batch_norm import TorchBatchNormInfer, TorchBatchNormTrain
from tileops_backend_example.torch_layer_norm import TorchLayerNorm
from tileops_backend_example.torch_rms_norm import TorchRMSNorm


@hookimpl
def tileops_register_kernels(register_kernel_type: RegisterKernelType) -> None:
    """Register the kernels; the TileLang one only where it can be built."""
    register_kernel_type("LayerNormFwdOp", "torch", TorchLayerNorm)
    register_kernel_type("RMSNormFwdOp", "torch", TorchRMSNorm)
    register_kernel_type("BatchNormFwdOp", "torch_train", TorchBatchNormTrain)
    register_kernel_type("BatchNormFwdOp", "torch_infer", TorchBatchNormInfer)
    missing = toolchain_missing()
    if missing is None:
        register_kernel_type("LayerNormFwdOp", "row", TileLangRowLayerNorm)
    else:
        note(f"layer norm in TileLang is left out: {missing}")


@hookimpl
def tileops_register_targets(register_kernel_builder: RegisterKernelBuilder) -> None:
    """Register the target: it takes RMS norm over, for whoever names it."""
    register_kernel_builder("RMSNormFwdOp", "example", build_rms_norm)
