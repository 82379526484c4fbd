package targets

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	targetAvailable = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_available",
		Help: "1 while a backup target can be used, by the node that looks after the target."}, []string{"target"})
	sweptBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backup_target_swept_bytes_total",
		Help: "Bytes that sweeps of this node freed in the store of a backup target."}, []string{"target"})
	verifiedBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_backup_target_verified_bytes_total",
		Help: "Bytes that this node read from the store of a backup target to verify them."}, []string{"target"})
	damagedBlobs = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backup_target_damaged_blobs",
		Help: "Blobs that backups need and that the store lost or changed, by the last verification of this node."},
		[]string{"target"})
)

func init() { metrics.Registry.MustRegister(targetAvailable, sweptBytes, verifiedBytes, damagedBlobs) }
