package admin

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Metrics answers GET /metrics with the metrics of g.
func Metrics(g prometheus.Gatherer, log *slog.Logger) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, // an error in one metric must not remove the other metrics from the answer
		ErrorLog:      &scrapeLog{log: log, problems: lograte.Limiter[string]{Every: scrapeProblemEvery, Most: scrapeProblems}},
	})
}

// Limits of the log of problems with metrics: each problem once in scrapeProblemEvery, and at
// most scrapeProblems in this time. Scrapes repeat every few seconds.
const (
	scrapeProblemEvery = 10 * time.Minute
	scrapeProblems     = 100
)

// scrapeLog logs the errors of promhttp, except those of the connection: a scraper that leaves
// causes an error for each of the remaining metrics.
type scrapeLog struct {
	log      *slog.Logger
	problems lograte.Limiter[string] // decides which errors are logged, by their text
}

// Println implements promhttp.Logger.
func (l *scrapeLog) Println(v ...any) {
	for _, part := range v {
		err, _ := part.(error)
		if broken := (net.Error)(nil); errors.As(err, &broken) || errors.Is(err, http.ErrHandlerTimeout) {
			return
		}
	}
	if text := strings.TrimSpace(fmt.Sprintln(v...)); l.problems.Allow(text) {
		l.log.Error(text)
	}
}
