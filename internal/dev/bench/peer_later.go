package main

import "context"

type (
	overhead struct{}
)

func (s *peerSuite) overheadRun(context.Context) error { return nil }
func (p *page) overheadTable()                         {}
