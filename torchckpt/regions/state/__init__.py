"""The state that a replay must find as the forward found it.

    boundary          the arguments
    module_state      parameters and buffers, and their substitutes in a replay
    layout, norms     where modules hold them; running statistics, updated once
    reached           the norm layers and the compiled code that a function can call
    ambient           settings and random numbers
"""
__all__: list[str] = []
