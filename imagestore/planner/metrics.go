package planner

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
)

var (
	imageSize = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backing_image_size_bytes",
		Help: "Bytes that one copy of a backing image takes on a disk."}, []string{"backing_image"})
	imageVirtualSize = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backing_image_virtual_size_bytes",
		Help: "Size of the disk inside a backing image."}, []string{"backing_image"})
	imageCopies = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "drover_backing_image_copies",
		Help: "Copies of a backing image by state."}, []string{"backing_image", "state"})
)

func init() {
	metrics.Registry.MustRegister(imageSize, imageVirtualSize, imageCopies)
}

func setImageMetrics(img *api.BackingImage) {
	imageSize.WithLabelValues(img.Name).Set(float64(img.Status.Size))
	imageVirtualSize.WithLabelValues(img.Name).Set(float64(img.Status.VirtualSize))
	n := map[api.ImageState]int{}
	for _, c := range img.Status.Copies {
		n[c.State]++
	}
	for state := range rank {
		imageCopies.WithLabelValues(img.Name, string(state)).Set(float64(n[state]))
	}
}

func forgetImageMetrics(name string) {
	imageSize.DeleteLabelValues(name)
	imageVirtualSize.DeleteLabelValues(name)
	for state := range rank { // a partial match would visit the metrics of all images
		imageCopies.DeleteLabelValues(name, string(state))
	}
}
