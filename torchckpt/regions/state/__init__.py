"""The state that a replay must find as the forward found it.

    boundary          the arguments
    module_state      parameters and buffers, and what stands for them in a replay
    substitutes       which a replay finds on modules
    layout, norms     where modules hold them; running statistics, updated once
    settings          their numbers, words and modes
    reached           the modules and the compiled code that a function can call, found by a walk
    walk              what functions and classes hold and name
    ambient           settings and random numbers
    host_random       generators of Python and NumPy
"""
__all__: list[str] = []
