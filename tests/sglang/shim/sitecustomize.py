"""Lets SGLang be imported on a machine without a GPU: put this folder on PYTHONPATH.

SGLang imports kernel and media packages that exist for CUDA only, or that a text model on a CPU never calls.
Python runs this file when it starts, in the server's children too. What stands in for those packages does nothing:
a class that decorates, or is inherited from. A kernel of `sgl_kernel` raises when it is called, so nothing wrong is
ever computed.
"""

import importlib.machinery
import os
import sys
import types

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch would look for triton's compiler for the rotation of images

VERSIONS = {"triton": "3.6.0", "torchaudio": "2.11.0", "torchvision": "0.28.0", "sgl_kernel": "0.0.0"}
CALLED_ON_IMPORT = {
    "triton.cdiv": lambda a, b: -(-a // b),
    "triton.next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
}


class _InertType(type):
    """The type of classes that decorate a function by returning it and that have any attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _inert(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **options):
        if "inert" not in vars(cls):  # a subclass of SGLang's own
            return super().__call__(*args, **options)
        return args[0] if len(args) == 1 and callable(args[0]) and not options else lambda function: function


def _inert(name):
    return _InertType(name, (), {"inert": True, "__class_getitem__": classmethod(lambda cls, _: cls)})


class _Kernel:
    """What `sgl_kernel` holds: it has any attribute, and raises when it is called."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is a CUDA kernel, and this is its stand-in")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = CALLED_ON_IMPORT.get(full) or sys.modules.get(full)
        if value is None:
            value = _Kernel(full) if full.startswith("sgl_kernel.") else _inert(full)
        setattr(self, name, value)
        return value


class _Finder:
    """Finds every module of an absent package; installed packages are found before it is asked."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        package = name.partition(".")[0]
        if package == "torchvision" and "sglang" not in sys.modules:
            return None  # a trainer's transformers would prepare images with it
        if package in VERSIONS:
            return importlib.machinery.ModuleSpec(name, _Finder, origin=__file__, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return _Module(spec.name)

    @staticmethod
    def exec_module(module):
        module.__file__ = __file__
        module.__version__ = VERSIONS[module.__name__.partition(".")[0]]


sys.meta_path.append(_Finder)


CPU_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Kernels of Qwen3.5, which the image processor of all Qwen models imports."""


class _Unpinned:
    """Before SGLang's LoRA is imported, lets memory that it would pin for a GPU be ordinary memory."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "sglang.srt.lora":
            return
        import torch

        def ordinary(make):
            return lambda *args, pin_memory=False, **options: make(*args, **options)

        for function in ("arange", "empty", "tensor", "zeros"):
            setattr(torch, function, ordinary(getattr(torch, function)))
        torch.Tensor.pin_memory = lambda tensor: tensor


class _CpuKernels:
    """Before SGLang's models are imported, gives `torch.ops` the kernels that they name meanwhile."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "sglang.srt.models":
            return
        import torch

        for kernel in CPU_KERNELS:
            if not hasattr(torch.ops.sgl_kernel, kernel):
                setattr(torch.ops.sgl_kernel, kernel, _Kernel(f"sgl_kernel.{kernel}"))


class _UnregisteredRoutes:
    """Before what captures routes is imported, lets host memory that it would register with CUDA be ordinary memory."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "sglang.srt.state_capturer.base":
            from sglang.srt.mem_cache.pool_host import common

            common._cuda_host_register = lambda *_, **__: None


sys.meta_path[:0] = [_Unpinned, _CpuKernels, _UnregisteredRoutes]

if "sglang.launch_server" in sys.orig_argv:  # its processes are forks then, which need not import SGLang again
    import multiprocessing

    multiprocessing.set_start_method = lambda method, force=False: None
    sys.modules["sklearn"] = None  # transformers would import it for seconds, to decode speculatively
