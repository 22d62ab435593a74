// Package chaos tests that a failure of one process, host or link of a fleet
// affects no other part. It builds hosts with networks of their own. It kills,
// stops, cuts off and delays every role in turn while clients send requests,
// and compares each answer with that of one engine alone.
package chaos
