package proxy

import "net/http"

// OwnPage is for tests.
var OwnPage = ownPage

// Reading returns how many bodies of clients are being read.
func (s *Server) Reading() int { return s.bodies.Reading() }

// Handler returns the public endpoints.
func (s *Server) Handler() http.Handler { return s.handler() }
