"""Recipe sections: frozen dataclasses; each field has a description, a unit and a hyperparameter name.

Each section validates its own fields on construction and raises `RecipeError`; constraints between sections are in
`recipe`. An option without effect is an error, because its author expected one.

Upper-case names (`hyperparameter`) are those of the Litespark training algorithm on SageMaker.
"""
