// Package deploy tries the launch recipes of deploy/: each is run as it is, with
// simulated engines in place of the real ones.
package deploy
