package main

import "context"

type (
	hitRow   struct{}
	overhead struct{}
)

func (s *peerSuite) hitsAll(context.Context) error     { return nil }
func (s *peerSuite) overheadRun(context.Context) error { return nil }
