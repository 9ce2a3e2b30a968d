"""The state that a replay must find as the forward found it.

    boundary          the arguments
    module_state      parameters and buffers, and their substitutes in a replay
    layout, norms     where modules hold them; running statistics, updated once
    reached           the norm layers that a function can call
    compilations      whether Dynamo has compiled since
    ambient           settings and random numbers
    streams           devices, and work on other streams to wait for
    determinism       the errors of a replay that differs; the name of a region in them
"""
__all__: list[str] = []
