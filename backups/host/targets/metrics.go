package targets

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
)

var (
	targetAvailable = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_available",
		Help: "1 while a backup target can be used, by the node that looks after the target."}, []string{"target"})
	writeFailed = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_write_failed",
		Help: "1 while the last write of a backup or copy failed, by the node that looks after the target."},
		[]string{"target"})
	sweptBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backup_target_swept_bytes_total",
		Help: "Bytes that sweeps of this node freed in the store of a backup target."}, []string{"target"})
	verifiedBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backup_target_verified_bytes_total",
		Help: "Bytes that this node read from the store of a backup target to verify them."}, []string{"target"})
	damagedBlobs = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_damaged_blobs",
		Help: "Blobs that backups need and that the store lost or changed, by the last verification of this node."},
		[]string{"target"})
	damagedBackups = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_damaged_backups",
		Help: "Backups that lost blobs, or their own description, by the last verification of this node."},
		[]string{"target"})
	usedBytes = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_used_bytes",
		Help: "Bytes of all chunks and lists in the repository of a backup target, by the node that looks after the target."},
		[]string{"target"})
	uniqueBytes = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_unique_bytes",
		Help: "drover_backup_target_used_bytes, with chunks that the store has several times counted once."},
		[]string{"target"})
)

func init() {
	metrics.Registry.MustRegister(targetAvailable, writeFailed, sweptBytes, verifiedBytes, damagedBlobs, damagedBackups,
		usedBytes, uniqueBytes)
}

// setWriteFailed sets the gauge of ConditionWriteFailed.
func setWriteFailed(t *api.BackupTarget) {
	failed := 0.0
	if meta.IsStatusConditionTrue(t.Status.Conditions, api.ConditionWriteFailed) {
		failed = 1
	}
	writeFailed.WithLabelValues(t.Name).Set(failed)
}

// setUsage sets the gauges of a target's use.
func setUsage(t *api.BackupTarget) {
	if u := t.Status.Usage; u != nil {
		usedBytes.WithLabelValues(t.Name).Set(float64(u.UsedBytes))
		uniqueBytes.WithLabelValues(t.Name).Set(float64(u.UniqueBytes))
	}
}

// setDamage sets the gauges of a target's damage.
func setDamage(t *api.BackupTarget) {
	if v := t.Status.Verification; v != nil {
		damagedBlobs.WithLabelValues(t.Name).Set(float64(v.DamagedBlobs))
		damagedBackups.WithLabelValues(t.Name).Set(float64(v.DamagedBackups))
	}
}
