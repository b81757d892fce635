"""The OpenAPI document, made from the structs of the routes, and the page that renders it."""
