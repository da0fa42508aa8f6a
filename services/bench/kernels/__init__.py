"""How fast the C++ kernels are on this machine. `measuring` loads torch; `engine.inside` measures with it too."""
