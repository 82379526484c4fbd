package attach

import (
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/replicas/engine"
)

// ioCollector reports the counts of the engines of all attached volumes.
type ioCollector struct {
	once        sync.Once
	attachments atomic.Pointer[Attachments]
}

var collector ioCollector

var (
	ioLabels  = []string{"volume", "op"}
	descOps   = prometheus.NewDesc("drover_volume_ops_total", "Requests done since the attach.", ioLabels, nil)
	descErrs  = prometheus.NewDesc("drover_volume_errors_total", "Requests that failed.", ioLabels, nil)
	descBytes = prometheus.NewDesc("drover_volume_bytes_total", "Bytes of requests that succeeded.", ioLabels, nil)
	descLat   = prometheus.NewDesc("drover_volume_latency_seconds", "Time from request to answer.", ioLabels, nil)
	descFull  = prometheus.NewDesc("drover_volume_waiting_for_space",
		"1 while writes wait because the disk is full.", []string{"volume"}, nil)
	descMembers = prometheus.NewDesc("drover_volume_members", "Replicas that get every write.", []string{"volume"}, nil)
	descDropped = prometheus.NewDesc("drover_volume_replicas_dropped_total",
		"Replicas that the volume went on without, since the attach.", []string{"volume"}, nil)
	descRebuilds = prometheus.NewDesc("drover_volume_rebuilds_total",
		"Replicas that became current again since the attach: by the writes in the meantime, or compared as a whole.",
		[]string{"volume", "kind"}, nil)
	descRebuilt = prometheus.NewDesc("drover_volume_rebuild_bytes_total",
		"Bytes of replicas that rebuilds compared, and sent because they differed; repaired bytes of damaged members.",
		[]string{"volume", "what"}, nil)
)

// setupMetrics has the collector report the volumes of as.
func setupMetrics(as *Attachments) (err error) {
	collector.attachments.Store(as)
	collector.once.Do(func() { err = metrics.Registry.Register(&collector) })
	return err
}

// Describe implements prometheus.Collector.
func (*ioCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOps, descErrs, descBytes, descLat, descFull, descMembers, descDropped,
		descRebuilds, descRebuilt} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (f *ioCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range f.attachments.Load().Sessions() {
		full := 0.0
		if s.full.Load() {
			full = 1
		}
		ch <- prometheus.MustNewConstMetric(descFull, prometheus.GaugeValue, full, s.Volume)
		s.collectMembership(ch)
		stats := s.engine.Stats()
		for class, c := range stats {
			op := engine.Class(class).String()
			counter := func(d *prometheus.Desc, v uint64) {
				ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), s.Volume, op)
			}
			counter(descOps, c.Ops)
			counter(descErrs, c.Errors)
			counter(descBytes, c.Bytes)
			buckets := map[float64]uint64{}
			var sum uint64
			for i, le := range engine.Buckets {
				sum += c.Latency[i]
				buckets[le.Seconds()] = sum
			}
			sum += c.Latency[len(engine.Buckets)]
			ch <- prometheus.MustNewConstHistogram(descLat, sum, c.Seconds, buckets, s.Volume, op)
		}
	}
}

// collectMembership tells of the replicas of a volume.
func (s *Session) collectMembership(ch chan<- prometheus.Metric) {
	m := &s.membership
	m.mu.Lock()
	members := len(s.Members)
	m.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(descMembers, prometheus.GaugeValue, float64(members), s.Volume)
	count := func(d *prometheus.Desc, n *atomic.Int64, labels ...string) {
		labels = append([]string{s.Volume}, labels...)
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n.Load()), labels...)
	}
	count(descDropped, &m.dropped)
	count(descRebuilds, &m.deltas, "delta")
	count(descRebuilds, &m.fulls, "full")
	count(descRebuilt, &m.compared, "compared")
	count(descRebuilt, &m.sent, "sent")
	count(descRebuilt, &m.repaired, "repaired")
}
