"""`tileops backends doctor`: what is wrong with a backend or an environment, and how to mend it."""
