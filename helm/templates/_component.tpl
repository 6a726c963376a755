{{/* Objects with the same form for gateway, prefill and decode workers. All templates take (dict "root" $ "role" ROLE). */}}

{{/* Also takes "seen": a dict with the annotations of accounts that are rendered already, by name. Components may share one. */}}
{{- define "kvrelay.component.serviceaccount" -}}
{{- $account := (index .root.Values .role).serviceAccount -}}
{{- $name := include "kvrelay.component.serviceAccountName" . -}}
{{- $annotations := toJson $account.annotations -}}
{{- if and $account.create (ne (get .seen $name | default $annotations) $annotations) -}}
{{- fail (printf "serviceAccount %s has other annotations in %s than elsewhere; give them in one place, and set create to false in the others" $name .role) -}}
{{- end -}}
{{- if and $account.create (not (hasKey .seen $name)) -}}
{{- $_ := set .seen $name $annotations -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
  {{- with $account.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}
{{- end -}}

{{/* The accounts of a role's pools, except those that a role before it has, too. */}}
{{- define "kvrelay.component.serviceaccounts" -}}
{{- $seen := dict -}}
{{- range $role := list "gateway" "prefill" "decode" -}}
{{- $template := ternary "kvrelay.component.serviceaccount" "kvrelay.pools" (eq $role "gateway") -}}
{{- $accounts := include $template (dict "root" $.root "role" $role "template" "kvrelay.component.serviceaccount" "seen" $seen) -}}
{{- if eq $role $.role -}}{{ $accounts }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvrelay.component.pdb" -}}
{{- $values := index .root.Values .role -}}
{{- if $values.podDisruptionBudget.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "kvrelay.component.selectorLabels" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{- define "kvrelay.component.autoscaling" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- range $scaler, $own := dict "hpa" "metrics" "keda" "triggers" -}}
{{- $set := index $scaling $scaler -}}
{{- if and $set.enabled (eq (int $set.minReplicas) 0) (empty (index $set $own)) -}}
{{- fail (printf "%s.autoscaling.%s.minReplicas is 0, and the default metrics come from the pods themselves, so nothing would start the first pod; set it to 1, or give %s of your own" $.role $scaler $own) -}}
{{- end -}}
{{- end -}}
{{- if $scaling.hpa.enabled -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "kvrelay.component.scaled" . | nindent 4 }}
  minReplicas: {{ $scaling.hpa.minReplicas }}
  maxReplicas: {{ $scaling.hpa.maxReplicas }}
  metrics:
    {{- if $scaling.hpa.metrics }}
    {{- toYaml $scaling.hpa.metrics | nindent 4 }}
    {{- else }}
    {{- include (printf "kvrelay.metrics.hpa.%s" .role) . | nindent 4 }}
    {{- end }}
  {{- with $scaling.hpa.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if $scaling.keda.enabled -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "kvrelay.component.scaled" . | nindent 4 }}
  minReplicaCount: {{ $scaling.keda.minReplicas }}
  maxReplicaCount: {{ $scaling.keda.maxReplicas }}
  triggers:
    {{- if $scaling.keda.triggers }}
    {{- toYaml $scaling.keda.triggers | nindent 4 }}
    {{- else }}
    {{- include "kvrelay.metrics.keda" . | trim | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* A worker with several pods scales as one if they are a LeaderWorkerSet's group. Autoscaling a StatefulSet of such workers is refused. */}}
{{- define "kvrelay.component.scaled" -}}
{{- $kind := include "kvrelay.worker.kind" . -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
kind: {{ $kind }}
name: {{ include "kvrelay.component.fullname" . }}
{{- end -}}

{{/* The metric that each role scales by: work that waits for prefill workers, free memory of decode workers. */}}
{{- define "kvrelay.metrics.hpa.gateway" -}}
- type: Resource
  resource:
    name: cpu
    target: {type: Utilization, averageUtilization: 70}
{{- end -}}

{{- define "kvrelay.metrics.hpa.prefill" -}}
- type: Pods
  pods:
    metric: {name: kvrelay_waiting_prompt_tokens}
    target: {type: AverageValue, averageValue: "8000"}
- type: Pods
  pods:
    metric: {name: kvrelay_longest_wait_seconds}
    target: {type: AverageValue, averageValue: "1"}
{{- end -}}

{{/* Running requests per decode worker that trigger scaling up: three quarters of its --max-num-seqs, whose default depends on the device. */}}
{{- define "kvrelay.decode.mostRunning" -}}
{{- $decode := .root.Values.decode -}}
{{- div (mul 3 ($decode.settings.max_num_seqs | default (ternary 256 64 (not (empty $decode.gpu.resource))) | int)) 4 -}}
{{- end -}}

{{- define "kvrelay.metrics.hpa.decode" -}}
- type: Pods
  pods:
    metric: {name: kvrelay_kv_cache_usage_perc}
    target: {type: AverageValue, averageValue: 700m}
- type: Pods
  pods:
    metric: {name: kvrelay_num_requests_running}
    target: {type: AverageValue, averageValue: {{ include "kvrelay.decode.mostRunning" . | quote }}}
{{- end -}}

{{/* The same as Prometheus queries, for KEDA: (dict "root" $ "role" ROLE). A pool's replicas are the sum over the pool divided by the threshold. */}}
{{- define "kvrelay.metrics.keda" -}}
{{- $address := (index .root.Values .role).autoscaling.keda.prometheus -}}
{{- if not $address -}}
{{- fail (printf "%s.autoscaling.keda: KEDA needs to know what to scale by; set prometheus (an address) or triggers" .role) -}}
{{- end -}}
{{- $pods := printf "namespace=%q, pod=~\"%s-.*\"" .root.Release.Namespace (include "kvrelay.component.fullname" .) -}}
{{- $queries := dict -}}
{{- if eq .role "prefill" -}}
{{- $queries = dict "kvrelay_waiting_prompt_tokens" "8000" "kvrelay_longest_wait_seconds" "1" -}}
{{- else if eq .role "decode" -}}
{{- $running := include "kvrelay.decode.mostRunning" . -}}
{{- $queries = dict "kvrelay_kv_cache_usage_perc" "0.7" "kvrelay_num_requests_running" $running -}}
{{- else -}}
{{- $queries = dict "kvrelay_requests_in_flight" "200" -}}
{{- end -}}
{{- range $metric, $threshold := $queries }}
- type: prometheus
  metadata:
    serverAddress: {{ $address | quote }}
    query: sum({{ $metric }}{{ "{" }}{{ $pods }}})
    threshold: {{ $threshold | quote }}
{{- end }}
{{- end -}}

{{- define "kvrelay.component.monitor" -}}
{{- $monitor := (index .root.Values .role).monitor -}}
{{- if and $monitor.enabled (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
    {{- with $monitor.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "kvrelay.component.selectorLabels" . | nindent 6 }}
  podMetricsEndpoints:
    - port: {{ if eq .role "gateway" }}http{{ else }}admin{{ end }}
      path: /metrics
      {{- if and (eq .role "gateway") .root.Values.gateway.tls.secretName }}
      scheme: https
      # A pod is scraped by its address, which no certificate contains.
      tlsConfig: {insecureSkipVerify: true}
      {{- end }}
      interval: {{ $monitor.interval }}
{{- end -}}
{{- end -}}
