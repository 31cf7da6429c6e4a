"""Kernels that make the ops of tileops run on a CPU. Installing this distribution is the whole of its use."""

from tileops.backend import RegisterKernelBuilder, RegisterKernelType, hookimpl

from tileops_backend_example.kernels import buildable
from tileops_backend_example.target import build_rms_norm


@hookimpl
def tileops_register_kernels(register_kernel_type: RegisterKernelType) -> None:
    """Register every kernel that this machine can build."""
    for op, key, kernel in buildable():
        register_kernel_type(op, key, kernel)


@hookimpl
def tileops_register_targets(register_kernel_builder: RegisterKernelBuilder) -> None:
    """Register the target, which takes one op over for whoever names it."""
    register_kernel_builder("RMSNormFwdOp", "example", build_rms_norm)
