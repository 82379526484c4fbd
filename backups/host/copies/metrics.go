package copies

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	copiesRunning = prometheus.NewGauge(prometheus.GaugeOpts{Name: "drover_backup_copies_running",
		Help: "Copies of backups that this node makes now."})
	copyBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backup_copy_bytes_total",
		Help: "Bytes of completed copies of backups: read from the origin, and uploaded to the other backup target."},
		[]string{"what"})
)

func init() { metrics.Registry.MustRegister(copiesRunning, copyBytes) }
