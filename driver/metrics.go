package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// dataClient calls the data process through the socket.
func dataClient(socket string) *http.Client {
	return &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
}

// gatherData collects the metrics of the data process through the socket and labels the metrics. Without a data process
// the result is empty.
func gatherData(socket string) prometheus.GathererFunc {
	h := dataClient(socket)
	return func() ([]*dto.MetricFamily, error) {
		resp, err := h.Get("http://data/metrics")
		if err != nil {
			return nil, nil // no data process now: other metrics still count
		}
		defer resp.Body.Close()
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(resp.Body)
		if err != nil {
			return nil, fmt.Errorf("metrics of the data process: %w", err)
		}
		out := make([]*dto.MetricFamily, 0, len(families))
		for _, f := range families {
			for _, m := range f.Metric {
				m.Label = append(m.Label, &dto.LabelPair{Name: proto.String("process"), Value: proto.String("data")})
			}
			out = append(out, f)
		}
		return out, nil
	}
}

// metricsHandler serves the metrics of every registry.
func metricsHandler(log *slog.Logger, more ...prometheus.Gatherer) http.Handler {
	all := append(prometheus.Gatherers{metrics.Registry}, more...)
	return promhttp.HandlerFor(all, promhttp.HandlerOpts{
		ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ErrorHandling: promhttp.ContinueOnError,
	})
}

func serveHTTP(ctx context.Context, ln net.Listener, h http.Handler) error {
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(ln); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}

// healthHandler answers a health check: 200, or 503 with the cause.
func healthHandler(ask func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := ask(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	}
}
