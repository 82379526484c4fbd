package host

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	transferBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backing_image_transfer_bytes_total",
		Help: "Bytes read from the sources of backing images, by kind of source."}, []string{"source"})
	transferSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "drover_backing_image_transfer_duration_seconds", Help: "Time from the start of a transfer to its end.",
		Buckets: prometheus.ExponentialBuckets(0.1, 4, 9)}, []string{"source", "result"})
	transfersRunning = prometheus.NewGauge(prometheus.GaugeOpts{Name: "drover_backing_image_transfers",
		Help: "Transfers in progress on this node."})
)

func init() {
	metrics.Registry.MustRegister(transferBytes, transferSeconds, transfersRunning)
}
