package edge

import "github.com/prometheus/client_golang/prometheus"

var (
	openDesc = prometheus.NewDesc("pdproxy_connections_open",
		"Open connections of clients, by protocol: tcp or quic.", []string{"protocol"}, nil)
	refusedDesc = prometheus.NewDesc("pdproxy_connections_refused_total",
		"Connections of clients that were refused, by the limit: max_connections or max_connections_per_address.", []string{"reason"}, nil)
	evictedDesc = prometheus.NewDesc("pdproxy_connections_evicted_total",
		"Connections of clients that had no request and were closed to make room for new ones.", nil, nil)
	ownConnectionsDesc = prometheus.NewDesc("pdproxy_worker_connections_open",
		"Open connections of clients of this process, by protocol: tcp or quic. In a fleet each worker has a series.", []string{"protocol"}, nil)
	ownExchangesDesc = prometheus.NewDesc("pdproxy_worker_exchanges_open",
		"Requests that this process serves now. In a fleet each worker has a series.", nil, nil)
	forwardedDesc = prometheus.NewDesc("pdproxy_http3_forwarded_packets_total",
		"QUIC packets that the kernel gave to a process that does not own the connection, or that accepts no new clients, by way: passed out to another process, taken in from another process, or dropped.", []string{"way"}, nil)
)

// Describe implements prometheus.Collector.
func (s *Server) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{openDesc, ownConnectionsDesc, ownExchangesDesc, refusedDesc, evictedDesc, forwardedDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	if s.public != nil {
		s.places.collect(ch)
		ch <- prometheus.MustNewConstMetric(ownExchangesDesc, prometheus.GaugeValue, float64(s.options.Running()))
	}
	if s.quic == nil || s.quic.shared == nil {
		return
	}
	out, in, dropped := s.quic.shared.conn.Counts()
	for way, n := range map[string]uint64{"out": out, "in": in, "dropped": dropped} {
		ch <- prometheus.MustNewConstMetric(forwardedDesc, prometheus.CounterValue, float64(n), way)
	}
}

func (c *connections) collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for over, name := range [transports]string{carriedByTCP: "tcp", carriedByQUIC: "quic"} {
		ch <- prometheus.MustNewConstMetric(openDesc, prometheus.GaugeValue, float64(c.open[over]), name)
		ch <- prometheus.MustNewConstMetric(ownConnectionsDesc, prometheus.GaugeValue, float64(c.open[over]), name)
	}
	for reason, n := range c.refused {
		ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.CounterValue, float64(n), reason)
	}
	ch <- prometheus.MustNewConstMetric(evictedDesc, prometheus.CounterValue, float64(c.evicted))
}
