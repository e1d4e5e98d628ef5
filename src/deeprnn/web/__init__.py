"""The page: a small local server over run folders, and plain HTML, CSS and JavaScript modules."""
