"""Modules of which every call is a region.

    layers            those that a class, a pattern or a list selects; those whose calls move: ``offload_layers``
    module            one of them: ``checkpoint_module``
    mixin             a class in front of a module's own, that can be taken away again
"""
__all__: list[str] = []
