{{- /*
What KEDA asks Prometheus; deploy/prometheus/adapter-values.yml asks the same for HorizontalPodAutoscalers (a test compares them).

Latencies are 0 where nothing was measured. Gauges are not: without them nothing is known, and nobody is taken away.
*/ -}}

{{- define "diptych.series" -}}
namespace="{{ .Release.Namespace }}",release="{{ .Release.Name }}"
{{- end }}

{{- define "diptych.query.queuedTokens" -}}
sum(diptych_engine_queued_tokens{job="diptych-prefill",{{ include "diptych.series" . }}})
{{- end }}

{{- /* A time to first token that long prompts make, and no queue, is no reason for more workers: they would not make it shorter. */ -}}
{{- define "diptych.query.ttft" -}}
(histogram_quantile(0.95, sum by (le) (rate(diptych_ttft_seconds_bucket{ {{- include "diptych.series" . -}} }[2m]))) and on () sum(rate(diptych_stage_seconds_sum{stage="prefill_queue",{{ include "diptych.series" . }}}[2m])) > 0.2 * sum(rate(diptych_ttft_seconds_sum{ {{- include "diptych.series" . -}} }[2m]))) or on () vector(0)
{{- end }}

{{- define "diptych.query.kvUsage" -}}
avg(diptych_engine_kv_usage_ratio{job="diptych-decode",{{ include "diptych.series" . }}})
{{- end }}

{{- define "diptych.query.itl" -}}
(histogram_quantile(0.95, sum by (le) (rate(diptych_itl_seconds_bucket{ {{- include "diptych.series" . -}} }[2m]))) > 0) or on () vector(0)
{{- end }}

{{- /* How fast a pool may change, the same for both kinds. */ -}}
{{- define "diptych.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - {type: Percent, value: 100, periodSeconds: 60}
    - {type: Pods, value: 2, periodSeconds: 60}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}
