"""Serves etcd3's messages and stubs from a private descriptor pool, so that etcd3 works with any protobuf.

etcd3 0.12.0 ships code generated for protobuf 3, which protobuf 4 and later refuse to run. The descriptors in that
code are valid, so they are read from its source without running it, and classes are built from them. The pool is
private: other etcd clients in the process register the same message names in the default pool undisturbed.

*Runs in* agents and commands, on first use of the store; safe from several threads.
*Owns* the entries ``etcd3.etcdrpc`` and below of ``sys.modules``.
*Fails by* raising ConfigError when etcd3 is missing or not of the expected shape.
*Invariant*: installed once; nothing is left in ``sys.modules`` when building fails.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from elastic_trainer.errors import ConfigError

PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv", "auth", "rpc")  # in order of import: rpc.proto needs the other two
_HINT = "pip install 'etcd3>=0.12,<0.13'"
_LITERAL = re.compile(r"""(?:_b\()?(b?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"))""")
_lock = threading.Lock()


def load_etcd3() -> Any:
    """The ``etcd3`` package, importable whatever protobuf is installed."""
    with _lock:
        if "etcd3" not in sys.modules:
            # Looks up the package's spec without importing it: its __init__ would fail with protobuf 4.
            directory = source_directory()
            if PACKAGE not in sys.modules:
                sys.modules.update(build(directory))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it has deprecated imports, which users cannot fix
                return importlib.import_module("etcd3")
        except ImportError as error:
            raise ConfigError(f"the etcd3 package does not import: {error}", hint=_HINT) from error


def source_directory() -> Path:
    """The folder of the installed etcd3's generated modules."""
    spec = importlib.util.find_spec("etcd3")
    if spec is None or spec.origin is None:
        raise ConfigError("the etcd3 package is not installed", hint=_HINT)
    return Path(spec.origin).parent / "etcdrpc"


def build(directory: Path) -> dict[str, ModuleType]:
    """The modules ``etcd3.etcdrpc``, its three ``*_pb2`` and ``rpc_pb2_grpc``, built from ``directory``'s sources."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    modules: dict[str, ModuleType] = {}
    try:
        for name in _FILES:
            pool.AddSerializedFile(serialized_descriptor(directory / f"{name}_pb2.py"))
            module = _message_module(f"{PACKAGE}.{name}_pb2", pool.FindFileByName(f"{name}.proto"))
            modules[module.__name__] = module
        stubs = _stub_module(modules[f"{PACKAGE}.rpc_pb2"].DESCRIPTOR)
    except (TypeError, KeyError) as error:  # what protobuf raises for malformed or incomplete descriptors
        raise ConfigError(f"etcd3 in {directory} has unexpected descriptors: {error}", hint=_HINT) from error
    modules[stubs.__name__] = stubs
    modules[PACKAGE] = _package(modules)
    return modules


def serialized_descriptor(path: Path) -> bytes:
    """The ``serialized_pb`` argument in generated module ``path``: ``_b('...')`` or a bytes literal. No code is run.

    Only that literal is parsed: the whole module would take 0.2 s, in each agent and command.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"etcd3's {path.name} cannot be read: {error}", hint=_HINT) from error
    _, found, rest = source.partition("serialized_pb=")
    if not found:
        raise ConfigError(f"etcd3's {path.name} holds no descriptor", hint=_HINT)
    try:
        if (literal := _LITERAL.match(rest)) is not None:
            value: str | bytes = ast.literal_eval(literal[1])
            return value.encode("latin1") if isinstance(value, str) else value
    except (SyntaxError, UnicodeEncodeError):
        pass
    raise ConfigError(f"etcd3's {path.name} holds its descriptor in an unknown form", hint=_HINT)


def _message_module(name: str, descriptor: Any) -> ModuleType:
    """A module with the message classes and enums of one ``.proto`` file, like protoc's."""
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
    from google.protobuf.message_factory import GetMessageClass

    module = ModuleType(name)
    content: dict[str, Any] = {"DESCRIPTOR": descriptor}
    for message_name, message in descriptor.message_types_by_name.items():
        content[message_name] = GetMessageClass(message)
    for enum_name, enum in descriptor.enum_types_by_name.items():
        content[enum_name] = EnumTypeWrapper(enum)
        content.update({value.name: value.number for value in enum.values})
    vars(module).update(content)
    return module


def _stub_module(descriptor: Any) -> ModuleType:
    module = ModuleType(f"{PACKAGE}.rpc_pb2_grpc")
    for service in descriptor.services_by_name.values():
        name = f"{service.name}Stub"
        setattr(module, name, type(name, (), {"__init__": _stub_initialiser(service)}))
    return module


def _stub_initialiser(service: Any) -> Callable[[Any, Any], None]:
    """An ``__init__(self, channel)`` that gives the stub one callable for each method of ``service``."""
    from google.protobuf.message_factory import GetMessageClass

    def initialise(self: Any, channel: Any) -> None:
        for method in service.methods:
            request = "stream" if method.client_streaming else "unary"
            response = "stream" if method.server_streaming else "unary"
            call = getattr(channel, f"{request}_{response}")(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    return initialise


def _package(modules: dict[str, ModuleType]) -> ModuleType:
    """The package itself: like etcd3's own ``__init__`` it re-exports rpc_pb2 and rpc_pb2_grpc."""
    package = ModuleType(PACKAGE)
    package.__path__ = []
    for name, module in modules.items():
        setattr(package, name.rpartition(".")[2], module)
    for exporter in ("rpc_pb2", "rpc_pb2_grpc"):
        public = vars(modules[f"{PACKAGE}.{exporter}"]).items()
        vars(package).update({name: value for name, value in public if not name.startswith("_")})
    return package
