package admin

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// DashboardRequests is the answer of GET /v1/dashboard/requests.
type DashboardRequests struct {
	journal.During
	Silent int `json:"silent_workers"` // workers that gave no answer
}

// requestsPath is the path of the requests of a period.
const requestsPath = "/v1/dashboard/requests"

// requests answers GET /v1/dashboard/requests.
func (d *dashboardView) requests(w http.ResponseWriter, r *http.Request) {
	var period [2]time.Time
	for i, name := range [...]string{"from", "to"} {
		seconds, err := strconv.ParseFloat(r.URL.Query().Get(name), 64)
		if err != nil || !(seconds >= 0 && seconds < math.MaxInt64/1e9) {
			downstream.Error(w, openai.NewFieldError(openai.CodeBadValue, name, name+" is a number of seconds since the Unix epoch"))
			return
		}
		period[i] = time.UnixMicro(int64(seconds * 1e6))
	}
	if period[1].Before(period[0]) {
		downstream.Error(w, openai.NewFieldError(openai.CodeBadValue, "to", "to is before from"))
		return
	}
	all := DashboardRequests{During: d.o.Ended.During(period[0], period[1])}
	all.Since = max(all.Since, float64(d.began.UnixMilli())/1e3)
	answers, silent := d.askWorkers(r.Context(), http.MethodGet, requestsPath+"?"+r.URL.Query().Encode())
	all.Silent = silent
	for _, a := range answers {
		var part DashboardRequests
		if a.Status != http.StatusOK || json.Unmarshal(a.Body, &part) != nil {
			all.Silent++
			continue
		}
		all.Troubled, all.Others = append(all.Troubled, part.Troubled...), append(all.Others, part.Others...)
		all.Total, all.Since = all.Total+part.Total, max(all.Since, part.Since)
	}
	all.Troubled, all.Others = newest(all.Troubled, journal.MaxDuring, nil), newest(all.Others, journal.MaxDuring, nil)
	downstream.JSON(w, 200, all)
}
