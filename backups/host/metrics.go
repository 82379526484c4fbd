package host

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	backupsRunning = prometheus.NewGauge(prometheus.GaugeOpts{Name: "drover_backups_running",
		Help: "Backups that this node makes now."})
	backupBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backup_bytes_total",
		Help: "Bytes of completed backups: read from the disks of this node, and uploaded to backup targets."},
		[]string{"what"})
	backupPauses = prometheus.NewCounter(prometheus.CounterOpts{Name: "drover_backup_pause_seconds_total",
		Help: "Time in which the backups of this node paused for the I/O of volumes."})
	backupSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "drover_backup_seconds",
		Help:    "Time from the start of an attempt to make a backup to its end.",
		Buckets: prometheus.ExponentialBuckets(0.1, 4, 9)}, []string{"result"})
)

func init() {
	metrics.Registry.MustRegister(backupsRunning, backupBytes, backupPauses, backupSeconds)
}
