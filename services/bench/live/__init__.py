"""Live pipelines measured as a person would: started by `cohort serve`, loaded over HTTP, asked through the monitor.

`pipelines` starts and stops one; `spec` reads what is to be compared, `expressions` computes its columns, `runs`
measures it round by round, `results` puts rounds together. `fidelity` and `overhead` compare things of another kind.
"""
