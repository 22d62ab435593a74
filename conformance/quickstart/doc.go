// Package quickstart checks the files for containers of `pdproxy quickstart --out`: the parser of
// Docker Compose reads docker-compose.yaml, and the types of Kubernetes read kubernetes.yaml. It is
// a module of its own, because only this test needs both.
package quickstart
