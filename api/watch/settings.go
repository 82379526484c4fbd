package watch

import (
	"context"
	"log/slog"
	"strconv"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// SettingNumber returns a numeric setting, or the default if the setting does not exist or is no number.
func SettingNumber(ctx context.Context, c client.Reader, name string, log *slog.Logger) int64 {
	var s api.Setting
	text := api.Settings[name]
	if err := c.Get(ctx, client.ObjectKey{Name: name}, &s); err == nil {
		text = s.Value
	} else if client.IgnoreNotFound(err) != nil {
		log.Warn("setting cannot be read, the default counts", "setting", name, "error", err)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		log.Warn("setting is not a number, the default counts", "setting", name, "value", text)
		n, _ = strconv.ParseInt(api.Settings[name], 10, 64)
	}
	return n
}
