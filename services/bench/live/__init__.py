"""Live pipelines measured as a person would: started by `cohort serve`, loaded over HTTP, asked through the monitor.

`pipelines` starts and stops one; `measured` runs a cell of `cohort compare --live`.
"""
