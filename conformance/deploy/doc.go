// Package deploy tests the launch recipes of deploy/. It runs each one
// unchanged, with simulated engines in place of the real ones. It also runs `pdproxy demo`.
package deploy
