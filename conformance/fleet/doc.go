// Package fleet proves that a coordinator and its workers are one proxy: the
// workers' requests are placed by one mind, go on when it is away, and are in its
// books again when it is back.
package fleet
