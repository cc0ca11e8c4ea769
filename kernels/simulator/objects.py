"""Objects that kernels define and pass around."""

import dataclasses
from typing import Any


class _Initialised(type):
    """Gives classes without an initialiser of their own the one that NKI documents.

    Every class attribute is a parameter, annotated or not, with or without @dataclass; those without a value are None.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if _has_own_initialiser(cls):
            return super().__call__(*args, **kwargs)
        names = _parameters(cls)
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or set(kwargs) - set(names):
            raise TypeError(f"{cls.__name__}() takes {', '.join(names)}; it got {args} {kwargs}")
        made: Any = object.__new__(cls)  # type: ignore[arg-type]
        for name in names:
            object.__setattr__(made, name, given[name] if name in given else _default(cls, name))
        if hasattr(made, "__post_init__"):
            made.__post_init__()
        return made


def _has_own_initialiser(cls: type) -> bool:
    code = getattr(cls.__init__, "__code__", None)  # type: ignore[misc]
    # dataclass compiles what it generates from a string.
    return code is not None and code.co_filename != "<string>"


def _parameters(cls: type) -> list[str]:
    names: list[str] = []
    for base in reversed(cls.__mro__):
        annotated = list(vars(base).get("__annotations__", {}))
        plain = [
            name
            for name, value in vars(base).items()
            if not name.startswith("__")
            and not callable(value)
            and not isinstance(value, property | classmethod | staticmethod)
        ]
        names += [name for name in (*annotated, *plain) if name not in names]
    return names


def _default(cls: type, name: str) -> Any:
    field = getattr(cls, "__dataclass_fields__", {}).get(name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return getattr(cls, name, None)


class NKIObject(metaclass=_Initialised):
    """Base class of kernels' own classes, as `nki.language.NKIObject`."""
